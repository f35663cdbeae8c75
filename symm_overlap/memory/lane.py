"""Lanes: where an op in flight keeps its workspace, its channels and its place in the sequence of calls.

A lane belongs to one group and device. Calls on one lane follow one another, and every rank must issue them in the same
order, as with any collective. Ops that are to be in flight at the same time, from several threads or CUDA streams, take
a lane each: lanes share neither memory nor channels, so they cannot disturb one another.

A lane's workspace is double buffered. Call k uses half k mod 2, and by the time it starts every peer has finished call
k-2, the last one to use that half (`symm_overlap.plan.all_gather_consume` says why). So the halves may be laid out anew
by every call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from math import prod
from operator import index as as_int
from weakref import WeakKeyDictionary, WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from .._torch import SymmetricMemory, resolve_group
from ..plan import CHANNELS, ThreadStreams
from ..plan.execute import Streams
from .signals import CpuSignals, Signals, naming
from .timeouts import not_while_compiling, timeout_ms
from .workspace import allocate

_ALIGN = 256  # bytes; a unit starts on a boundary that suits vector loads and copy engines alike
_SMALLEST = 1 << 20  # bytes of a first workspace: small calls of different shapes then share one


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of a unit in a workspace."""
    return -(-nbytes // _ALIGN) * _ALIGN


class NotPreparedError(RuntimeError):
    """A call was refused, before it had begun, since its lane cannot grow while a CUDA graph is captured."""


class Lane:
    """One sequence of calls of one group on one device.

    Args:
        pid: the process that is this rank of the group; one forked from it is not.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, index: int, pid: int) -> None:
        self.group_name, self.device, self.index = group.group_name, device, index
        self._tag = f"{device.type} lane {index}"
        self.rank, self.world = group.rank(), group.size()
        self.lock = threading.Lock()
        self._pid = pid
        self.calls = 0
        self.half = 0  # bytes
        self.broken: str | None = None
        self.streams: Streams = _streams(device, WeakMethod(self._abandon))
        self.signals: Signals
        self._handle: SymmetricMemory
        self._done: torch.cuda.Event | None = None
        self._last_stream: torch.cuda.Stream | None = None
        self._captured: dict[int, tuple[Tensor, SymmetricMemory]] = {}  # by size: a lane only grows

    def reserve(self, nbytes: int) -> None:
        """Make room for a call that needs ``nbytes`` of workspace. Collective when the workspace has to grow."""
        if nbytes <= self.half:
            return
        half = max(_SMALLEST, 1 << (nbytes - 1).bit_length() if nbytes < 1 << 26 else aligned(nbytes))
        self._tensor, self._handle = allocate(2 * half, self.device, resolve_group(self.group_name), self._tag)
        if self.device.type == "cpu":
            self.signals = CpuSignals(self._tensor, self.group_name)
        elif not hasattr(self, "signals"):
            self.signals = self._cuda_signals()
        self.half, self.calls = half, 0

    def _cuda_signals(self) -> Signals:
        from .cuda_signals import CudaSignals

        return CudaSignals.create(
            resolve_group(self.group_name), self.device, lane=self.index, tag=self._tag, channels=CHANNELS
        )

    def view(self, rank: int, parity: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in half ``parity`` of the workspace of ``rank``, ``offset`` bytes into the half."""
        start = parity * self.half + offset
        if offset + prod(shape) * dtype.itemsize > self.half:
            raise IndexError(
                f"{tuple(shape)} of {dtype} at byte {offset} does not fit a workspace of {self.half} bytes"
            )
        return self._handle.get_buffer(rank, tuple(shape), dtype, start // dtype.itemsize)

    @contextmanager
    def call(self, op: str, nbytes: int) -> Iterator[int]:
        """One call on this lane, with ``nbytes`` of workspace; yields its parity.

        Raises:
            RuntimeError: an earlier call on this lane failed, or this process was forked from the rank's.
            NotPreparedError: the workspace has to grow while a CUDA graph is being captured; call `prepare` before.
        """
        nbytes = max(1, nbytes)  # a call that needs no workspace still needs its channels
        if nbytes > self.half and self._capturing():
            raise NotPreparedError(
                f"{op} needs {nbytes} bytes of workspace, lane {self.index} of group {self.group_name!r} "
                f'has {self.half}: call symm_overlap.prepare(group, {nbytes}, "cuda") before capturing a CUDA graph'
            )
        with self.turn(op), self.on_device():
            try:
                self.reserve(nbytes)
            except dist.DistBackendError as error:
                raise naming(op, error) from None
            if capturing := self._capturing():
                # Replays use this workspace, also once the lane has grown another one.
                self._captured[self.half] = self._tensor, self._handle
            else:
                self._order_streams()
            self.signals.begin(op, timeout_ms() / 1000)
            yield self.calls % 2
            # A call that is only captured has not used its half. Counted, it would give the next one the half of the
            # last that did run, which a peer may still be reading. Replays, between their barriers, may use any half.
            if not capturing:
                self.calls += 1
                self._order_streams(done=True)

    @contextmanager
    def turn(self, op: str) -> Iterator[None]:
        """The lane for one call alone; one that fails may have left peers half way, so nothing can follow it.

        Raises:
            RuntimeError: an earlier call on this lane failed, or this process was forked from the rank's.
        """
        with self.lock:
            self.require_in_step()
            try:
                yield
            except BaseException as error:
                self.give_up(op, error)
                raise

    def require_in_step(self) -> None:
        """Raises RuntimeError when no call can follow: an earlier one failed, or this is not the rank's own process."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"this process was forked from rank {self.rank} of group {self.group_name!r} (pid {self._pid}), and "
                "cannot make calls in its place: start ranks, and workers that call ops, with spawn, not fork"
            )
        if self.broken is not None:
            raise RuntimeError(
                f"lane {self.index} of group {self.group_name!r} is out of step with its peers since a call failed "
                f"({self.broken}). Make a new group, or use another lane, on every rank."
            )

    def give_up(self, op: str, error: BaseException) -> None:
        """After a call has failed in a way that may have left peers half way."""
        self.broken = f"{op}: {type(error).__name__}"
        if self.device.type == "cpu":
            self._abandon()
        elif hasattr(self, "signals"):
            with suppress(RuntimeError):  # CUDA itself has failed
                self.signals.give_up(op)  # type: ignore[attr-defined]
        with suppress(RuntimeError):  # the group is no more
            # A peer that finished the call may come to make room for its next one.
            _C.refuse_rendezvous(self.group_name, self._tag, f"its lane broke in {self.broken}")

    def _abandon(self) -> None:
        """On CPU, end every wait for a signal on this lane, here and at the peers, now and later."""
        if self.device.type == "cpu" and self.half:
            with suppress(RuntimeError):  # the group is no more
                _C.give_up(self._tensor, self.group_name)

    def gone(self, peer: int) -> str:
        """Why nothing more will come from ``peer`` on this lane, as far as is known; empty while something may."""
        if self.device.type == "cpu" and self.half:
            return _C.gone(self._tensor, self.group_name, peer)
        return _C.death_of(self.group_name, peer)

    def on_device(self) -> AbstractContextManager[object]:
        """On CUDA, the lane's device as the current one: torch asks that one whether its stream is being captured."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _capturing(self) -> bool:
        """Whether what is issued now goes into a CUDA graph."""
        if self.device.type != "cuda":
            return False
        with self.on_device():
            return torch.cuda.is_current_stream_capturing()

    def _order_streams(self, done: bool = False) -> None:
        """On CUDA, keep a call behind the lane's last one, which may have been issued on another stream.

        Not while a graph is captured: a graph cannot wait for an event from outside it. Its calls are one stream's.
        """
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if done:
            self._done = self._done or torch.cuda.Event()
            self._done.record(stream)
            self._last_stream = stream
        elif self._done is not None and stream != self._last_stream:
            self._done.wait(stream)


class _Lanes(dict[tuple[torch.device, int], Lane]):
    """The lanes of one group, and the process that made the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()


_lanes: WeakKeyDictionary[dist.ProcessGroup, _Lanes] = WeakKeyDictionary()
_lanes_lock = threading.Lock()
_current = threading.local()


def current_lane() -> int:
    """The lane that the calling thread uses; see `lane`."""
    index: int = getattr(_current, "index", 0)
    return index


def lane_for(group: dist.ProcessGroup, device: torch.device) -> Lane:
    """The lane that the calling thread uses for this group and device."""
    key = (device, current_lane())
    with _lanes_lock:
        lanes = _lanes.get(group)
        if lanes is None:
            lanes = _lanes[group] = _Lanes()
        if key not in lanes:
            lanes[key] = Lane(group, device, key[1], lanes.pid)
        return lanes[key]


@contextmanager
def lane(index: int) -> Iterator[None]:
    """Run the ops that the calling thread issues inside the block on lane ``index``.

    Ops on different lanes may overlap in time, from several threads or CUDA streams. On one lane they follow one
    another, and all ranks must issue them in the same order. Outside any block the lane is 0.

    Args:
        index: any int from 0 on; the same on every rank for ops that belong together. On CUDA, lanes need ranks that
            can reach each other's memory; first use each lane (or `prepare` it) in one order on every rank, and set
            CUDA_DEVICE_MAX_CONNECTIONS=32 if ranks issue ops on different lanes in different orders.

    Raises:
        ValueError: ``index`` is negative. TypeError: it is no int.
        RuntimeError: the block is inside a compiled function, which would forget it: put it around the call.
    """
    not_while_compiling("lane")
    if as_int(index) < 0:
        raise ValueError(f"lane({index}): lanes are numbered from 0")
    before = current_lane()
    _current.index = index
    try:
        yield
    finally:
        _current.index = before


def _streams(device: torch.device, abandon: WeakMethod[Callable[[], None]]) -> Streams:
    if device.type == "cuda":
        from .cuda_streams import CudaStreams

        return CudaStreams(device)

    def end_waits() -> None:
        if (method := abandon()) is not None:
            method()

    # Not only no_grad: outputs that a caller makes in inference mode may be written in that mode alone.
    return ThreadStreams(torch.inference_mode, end_waits)
