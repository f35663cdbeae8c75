"""Epoch signals between the ranks of a group on GPUs, and the handling of a wait that passes its deadline.

A lane's control block (csrc/common/control_block.h) is in symmetric memory on every rank. This module has the Python
side of its kernels. A kernel cannot raise an error. When a wait passes its deadline, or its peer reports that one of
*its* waits failed, the wait returns and

1. notifies every peer, so that no peer mistakes the following data for a result or waits for a rank that has given up;
2. marks the lane as failed: its later waits return at once, and the last kernel of the call fills the outputs with NaN;
3. writes which rank waited for which into pinned host memory, where the next call on the lane, or `check_lanes`, finds
   it and raises.

If all ranks can, calls that are not captured signal and wait without kernels, by memory operations of their streams in
host memory (`_host_block`), unless their kernels read the peers' memory anyway (`meets_in_kernels`). Such a wait
occupies no multiprocessor, but has no deadline. A thread of the host does for it what is described above
(csrc/common/host_lane.h). For waits of either kind, that thread also checks ten times a second whether the processes of
the peers are alive.

An error on the host in the middle of a call is handled in the same way.

The CUDA context, other lanes and other groups stay usable. The failed lane is permanently out of step with its peers.

**CUDA graphs.** The epoch counters are in device memory, so each replay continues the count. The half of the workspace
that a call uses is fixed at capture, though. Within a graph, calls use the halves in turn, as they do outside a graph.
But the first call of a graph may follow any other call, even itself, and the host, which alternates the halves of the
calls that it issues, does not see the replays. So there are barriers that other calls do not need. One is ahead of the
first call of a graph. On a lane that graphs were captured with, another is ahead of each call that the host issues. The
latter reads in the control block whether there was a replay since the last call issued by the host, and the ranks meet
only if there was. Both barriers protect the memory that the call writes to: behind the barrier, every peer has finished
all earlier calls.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial

import torch
from torch.distributed import DistBackendError, ProcessGroup

from ... import _C
from ..._torch import SymmetricMemory, symm_mem
from ..freeing import let_go
from ..lasting_memory import lasting
from ..symmetric import on_every_rank, rendezvous
from .memory_operations import stream_waits
from .streams import stream_ahead

SLEEP_CYCLES = 100  # of the sleep step: enough for the other stream's kernel to start first, negligible for a matmul
_MASK = 0xFFFFFFFF  # the record's numbers have 32 bits
_lanes: weakref.WeakSet[CudaSignals] = weakref.WeakSet()
_lanes_guard = threading.Lock()
_CPU = torch.device("cpu")
_MOST_RANKS = 256  # that signal and wait by memory operations (kMostRanks in csrc/cuda)


class CudaSignals:
    """The signals of one lane. Every method enqueues one small kernel, or memory operations, on the current stream.

    The n-th `wait` for a (peer, channel) passes once that peer's n-th `signal` to this rank on the channel has come.
    What the peer's stream did before is then visible to what follows here. A signal or a wait may be for one peer or
    for several, each named at most once. A wait for several peers passes once the signals of all of them have come. All
    signals of one (peer, channel) must come from one stream, or from streams ordered by events. The same holds for its
    waits.

    Args:
        control: this rank's control block, as allocated by `create`.
        handle: what the rendezvous of ``control`` returned.
        group_name, lane: the name of the group, and the lane's index.
        channels: channels 0 to channels - 1 may be used. The same number on every rank.
        hosts: this rank's host block, as allocated by `_host_block`; or, if all ranks are in this process, one pinned
            tensor for each. Given on every rank or on none.

    Raises:
        ValueError: ``control``, or one of ``hosts``, does not have the size or dtype for this world size and number of
            channels.
    """

    def __init__(
        self,
        control: torch.Tensor,
        handle: SymmetricMemory,
        *,
        group_name: str,
        lane: int,
        channels: int,
        hosts: Sequence[torch.Tensor] = (),
    ) -> None:
        self.rank, self.world = handle.rank, handle.world_size
        self._where = f"group {group_name!r} (lane {lane}), rank {self.rank} of {self.world}"
        self._handle = handle  # keeps the peers' blocks mapped
        addresses = [
            control.data_ptr() if peer == self.rank else handle.get_remote_tensor(peer, [1], control.dtype).data_ptr()
            for peer in range(self.world)
        ]
        self._device = control.device
        peers = lasting(lambda: torch.tensor(addresses, dtype=torch.int64, device=control.device), control.device)
        self._replays = channels  # one more channel, for the barriers ahead of calls
        self._lane = _C.CudaLane(control, peers, self.rank, self.world, channels + 1, group_name, hosts)
        self._ahead = stream_ahead(control.device)
        self._ops: list[str] = []
        self._calls = 0
        self._reported = False
        # Bound methods of the C++ object, for speed: they run at every step of a plan.
        self.signal: Callable[[Sequence[int], int], None] = self._lane.signal
        self.wait: Callable[[Sequence[int], int], None] = self._lane.wait
        self.barrier: Callable[[int], None] = self._lane.barrier
        self.sleep: Callable[[int], None] = self._lane.sleep
        with _lanes_guard:
            _lanes.add(self)

    def __del__(self) -> None:
        if "_lane" in vars(self):  # which uses the control block
            let_go(vars(self), self._device)

    @classmethod
    def create(cls, group: ProcessGroup, device: torch.device, *, lane: int, tag: str, channels: int) -> CudaSignals:
        """Allocate the control blocks and share them among all ranks. Collective among the calls with this ``tag``.

        Must not be called while a CUDA graph is being captured.

        Raises:
            RuntimeError: there is not enough memory, on this rank or (`torch.distributed.DistBackendError`) on another.
        """
        words = _C.CudaLane.control_words(group.size(), channels + 1)

        def zeros() -> torch.Tensor:
            block: torch.Tensor = symm_mem.empty(words, dtype=torch.int32, device=device).zero_()
            # Zeroed before the rendezvous gives the peers its address, so that no early signal is overwritten by the
            # zeros.
            torch.cuda.synchronize(device)
            return block

        control = on_every_rank(zeros, group, tag)
        handle = rendezvous(control, group)
        lane_on = partial(cls, control, handle, group_name=group.group_name, lane=lane, channels=channels)
        host = _host_block(words, group, device, tag)
        pinned = None if host is None else _if_no_rank_fails(partial(lane_on, hosts=(host,)), group, tag)
        return on_every_rank(lane_on, group, tag) if pinned is None else pinned

    @cached_property
    def driver(self) -> _C.CudaDriver:
        """The driver that issues programs on this lane; see csrc/cuda/driver.h."""
        return _C.CudaDriver(self._lane, SLEEP_CYCLES)

    def begin(self, op: str, timeout: float, call_hash: int = 0, number: int = 0, by_kernels: bool = False) -> bool:
        """Begin a call. To be called before its first step, with the caller's stream current.

        Return whether the call is being captured. The current stream waits for the end of the last call, which may
        have been issued on another stream: of the last one in the same capture, or of the last one that was not
        captured.

        Args:
            op: name of the op, for the errors of the call's waits.
            timeout: the time limit of each wait of the call, in seconds, counted on the GPU from when the wait starts
                there. A captured graph keeps the timeout of its capture.
            call_hash: a hash of everything that must be the same on every rank: 64 bits, not negative; 0: calls are not
                compared. A captured call is never compared, since it may be replayed at any time.
            number: this rank's count of the calls that have run on the lane. Every call that is not captured adds one,
                whether or not the workspace grows.
            by_kernels: whether kernels signal and wait, on every rank, even if streams could use memory operations.

        Raises:
            DistBackendError: an earlier wait of the lane has failed; see `check`.
        """
        self.check()
        self._calls += 1
        deadline = max(1, round(timeout * 1e9)), call_hash, number & _MASK
        captured: bool = self._lane.begin(*self._named(op), *deadline, by_kernels)
        return captured

    def barrier_around_replays(self) -> bool:
        """Enqueue the barrier that keeps the call apart from replays of graphs, if one is needed; see the module's
        docstring. To be called after `begin`, before the call uses the workspace. Return whether the call is the first
        one of a graph that is being captured.
        """
        first: bool = self._lane.barrier_around_replays(self._replays)
        return first

    def end(self, outputs: Sequence[torch.Tensor], flags: _C.Flags | None = None) -> bool:
        """End a call: fill the outputs with NaN if a wait has failed. To be called after the last step, with the
        caller's stream current. Return whether the call runs, and is not only captured.

        Args:
            outputs: dense tensors, contiguous or a permutation of contiguous. Every byte becomes 0xFF, which is a NaN
                in each floating-point dtype and -1 in integers.
            flags: those that the call has used, if any (csrc/cuda/flags.h). They end with the call, and if a wait for
                one of them has failed, the outputs are filled, too.
        """
        runs: bool = self._lane.end(outputs, flags)
        return runs

    def give_up(self, op: str) -> None:
        """End every wait of the lane, on this rank and on the peers, after an error on the host in a call of ``op``."""
        # On another stream than the call's waits: peers may send what these wait for only after they are notified.
        with torch.cuda.stream(self._ahead):
            self._lane.give_up(*self._named(op))

    def _named(self, op: str) -> tuple[int, int]:
        """Return the two numbers by which a failure record identifies the current call."""
        if op not in self._ops:
            self._ops.append(op)
        return self._ops.index(op), self._calls & _MASK

    def check(self) -> None:
        """Raise if a wait of the lane has failed, as far as the host can see without synchronising.

        Raises:
            DistBackendError: the message names op, group, rank, peer, channel, and the expected and the found epoch.
        """
        record = self._lane.failure()
        if record is not None:
            self._reported = True
            raise DistBackendError(self._describe(record))

    def _describe(self, record: _C.FailureRecord) -> str:
        peer = record.peer
        if record.gave_up:
            why = "an error on the host ended the call. That error says what happened."
        elif record.peer_failed:
            why = f"rank {peer} gave up on this lane. Its own error says why."
        elif record.peer_died:
            why = (
                f"rank {peer} died before its signal on channel {record.channel} came (expected epoch "
                f"{record.expected}, found {record.found}). Its own output says why it ended; this group cannot go on."
            )
        elif record.mismatch:
            why = _C.different_call(f"rank {peer}", record.found_call, record.expected)
        else:
            why = (
                f"no signal from rank {peer} on channel {record.channel} by the deadline: expected epoch "
                f"{record.expected}, found {record.found}. Rank {peer} is late, has failed, or called another op: see "
                "its log. If it is only slow, raise the limit with symm_overlap.timeout(seconds)."
            )
        return (
            f"symm_overlap: {self._ops[record.op]}, call {record.call}, {self._where}: {why} The outputs of this "
            "and of later calls on the lane, and of earlier ones that were still running, are filled with NaN. Other "
            "lanes and groups are not affected."
        )


def _host_block(words: int, group: ProcessGroup, device: torch.device, tag: str) -> torch.Tensor | None:
    """Return memory for the host block of a lane (csrc/common/control_block.h), shared by the processes of all ranks.

    Return None on every rank if there are too many ranks, or if one of them has no memory operations or not enough
    memory. Collective among the calls with this ``tag``.
    """
    if group.size() > _MOST_RANKS:
        return None
    block = None
    with suppress(RuntimeError):  # no memory, or CUDA itself has failed: in either case the peers get an answer below
        if stream_waits(device):
            block = symm_mem.empty(words, dtype=torch.int32, device=_CPU)
    able = _C.exchange(group.group_name, "memory operations", "" if block is None else "yes", tag)
    if block is None or not all(able):
        return None
    _C.rendezvous(block, group.group_name, tag)
    return block


def _if_no_rank_fails(lane: Callable[[], CudaSignals], group: ProcessGroup, tag: str) -> CudaSignals | None:
    """Return a lane with host blocks, which each rank pins for its GPU; None on every rank if one of them may not pin
    them.

    The amount of memory that a process may pin is limited (by ``ulimit -l`` or a container). It may be enough for what
    `stream_waits` has tried, but not for the lane. A rank that fails warns, since kernels that wait occupy
    multiprocessors. Collective among the calls with this ``tag``.
    """
    made, failure = None, ""
    try:
        made = lane()
    except Exception as error:  # of any kind: peers wait for the answer. If not due to pinning, it comes again
        failure = f"{type(error).__name__}: {error}"
    failures = _C.exchange(group.group_name, "pinned memory", failure, tag)
    if failure:
        warnings.warn(f"symm_overlap: kernels wait for signals in group {group.group_name!r}: {failure}", stacklevel=2)
    return None if any(failures) else made


def check_lanes() -> None:
    """Raise if a wait of any lane of this process has failed. Each lane's failure is raised only once.

    Raises:
        DistBackendError: see `CudaSignals.check`.
    """
    with _lanes_guard:
        lanes = sorted(_lanes, key=lambda lane: lane._where)
    for lane in lanes:
        if not lane._reported:
            lane.check()
