"""A ring of slots in symmetric memory, which provides the buffers of consecutive calls.

Call k uses slot k modulo the number of slots, on every rank, regardless of the garbage collector. A slot is used again

- once this rank has finished the call after the one that used it. `symm_overlap.fsdp.communication.planners` explains
  why peers have then finished reading. On a GPU, the stream that requests the slot waits for that call;
- once the tensor that was handed out is gone. If the tensor is alive, all ranks together add slots to the ring, in new
  memory. Tensors in the old memory keep that memory mapped. If the ranks' programs differ and the tensor is alive on
  one rank only, that rank tries to add slots while its peers start the call. The hashes of the two differ, so every
  rank raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...collective.exchange.route import digest_of
from ...plan import Plan, Region, Step, Table, execute
from ...plan.layout import ALIGNMENT
from ...plan.ranges import range_of_call
from ...runtime import Backend, WorkOf, around, backend_of, call_hash, ranged, state_of
from ...settings import Settings, in_backward


@dataclass
class _Use:
    """The state of the buffer that was handed out in a slot.

    Attributes:
        alive: whether the memory still belongs to some tensor.
        freed: an event after the work that was queued on the current stream when the last such tensor was freed. None
            if there is no such event; see `Backend.mark`.
    """

    alive: bool = True
    freed: Any = None


@dataclass(frozen=True)
class Bound:
    """What the plan of one call works on.

    Attributes:
        at: returns the tensor at a region.
        tensors: by buffer, this rank's flat tensors outside of the slots.
        variant: a key for whatever the plan and its work depend on besides the slot. Calls with equal keys are issued
            by one program (`symm_overlap.runtime.script`), which is compiled in the first of them.
        work: returns what a step computes, or None if only ``table`` can compute it.
        table: the functions that run the steps that compute.
    """

    at: Callable[[Region], Tensor]
    tensors: Mapping[str, Tensor]
    variant: Hashable
    work: WorkOf
    table: Table


class Slots:
    """The slots of one kind of collective in one group.

    Args:
        op: the collective, for messages.
        count: the number of slots, at least 2.
        settings: the settings of the caller of `symm_overlap.fsdp.apply`. Settings blocks around a step override them.

    Attributes:
        nbytes: the bytes of a slot; 0 before there is memory.
        turn: how many calls there have been.
    """

    def __init__(self, op: str, group: dist.ProcessGroup, device: torch.device, count: int, settings: Settings) -> None:
        self.op, self.device, self.count, self.nbytes, self.turn = op, device, count, 0, 0
        self.lane = state_of(group).own_lane(group, device)
        self.rank, self.world = self.lane.rank, self.lane.world
        self.backend: Backend = backend_of(device.type)
        self._settings = settings
        self._current_stream = partial(torch.get_device_module(device).current_stream, device)
        self._mark = partial(self.backend.mark, device)
        self._uses: dict[int, _Use] = {}
        self._done: dict[int, Any] = {}  # for each slot, the event after the last call that used it

    @property
    def slot(self) -> int:
        """The slot of the next call."""
        return self.turn % self.count

    def reserve(self, count: int, nbytes: int) -> None:
        """Provide at least ``count`` slots of at least ``nbytes``. Collective if there are fewer slots, or smaller
        ones.

        Raises:
            RuntimeError: memory runs out on this rank or (`torch.distributed.DistBackendError`) on another.
        """
        if count <= self.count and nbytes <= self.nbytes:
            return
        count, nbytes = max(count, self.count), -(-max(nbytes, self.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        # Always new memory, even if the old memory is large enough: peers may read it, and tensors may be in it.
        half = max(-(-count * nbytes // 2), self.lane.workspace.half + 1)
        settings = in_backward(self._settings)
        digest = digest_of(self.op, "slots", count, nbytes)
        self.lane.reserve(half, settings.seconds, call_hash(digest, self.turn), self.op)
        self.count, self.nbytes = count, nbytes
        self._uses, self._done = {}, {}

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory in the slot of the next call. The current stream may use it from now on.

        Raises:
            RuntimeError: an earlier call failed, or a CUDA graph is being captured; see also `reserve`.
        """
        self._require_possible()
        nbytes = prod(size) * dtype.itemsize
        use = self._uses.get(self.slot)
        if nbytes > self.nbytes:
            self.reserve(self.count, nbytes)
        elif use is not None and use.alive:
            self.reserve(2 * self.count, nbytes)
        use = self._uses.get(self.slot)
        # Wait for the call after the last one that used this slot, and for the last use of its tensor.
        events = [self._done.get((self.turn + 1) % self.count)]
        if use is not None:
            events.append(use.freed)
            if use.freed is None:
                self.backend.synchronize(self.device)
        stream = self._current_stream()
        for event in events:
            if event is not None:
                stream.wait_event(event)
        workspace = self.lane.workspace
        tensor = workspace.place(self.rank, self.slot * self.nbytes, size, dtype)
        use = self._uses[self.slot] = _Use()
        ended = weakref.finalize(tensor.untyped_storage(), self._ended, self._mark, use, workspace.memory())
        ended.atexit = False
        return tensor

    @staticmethod
    def _ended(mark: Callable[[], Any], use: _Use, memory: object) -> None:
        """Note that the last tensor in a slot is gone. The finalizer kept ``memory`` alive until then."""
        use.freed = mark()
        use.alive = False

    def holds(self, tensor: Tensor) -> bool:
        """True if `allocate` returned this tensor for the next call."""
        if tensor.nbytes > self.nbytes or self.slot not in self._uses:
            return False
        slot = self.lane.workspace.place(self.rank, self.slot * self.nbytes, (1,), torch.uint8)
        return tensor.data_ptr() == slot.data_ptr()

    def part(self, region: Region, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor at a region of the buffer "slots", whose units have ``numel`` elements."""
        slot, part = divmod(region.start, self.world)
        offset = slot * self.nbytes + part * numel * dtype.itemsize
        return self.lane.workspace.place(region.rank, offset, ((region.stop - region.start) * numel,), dtype)

    def call(self, digest: int, outputs: Sequence[Tensor], plan: Plan, bind: Callable[[], Bound]) -> Any:
        """Make the next call. Return the event after it on the current stream, or None if the device has no events.

        Args:
            digest: 64 bits derived from everything that must be the same on all ranks.
            outputs: what the call writes; a failed wait on a GPU fills them with NaN.
            bind: returns what the plan works on. If it raises, the call ends on every rank.

        Raises:
            torch.distributed.DistBackendError: a peer is gone, late, or in another call.
            RuntimeError: an earlier call failed, or a CUDA graph is being captured.
        """
        self._require_possible()
        settings, lane = in_backward(self._settings), self.lane
        with around(lambda: self._range(outputs)):
            lane.run(
                self.op,
                lambda parity: self._issue(plan, bind(), settings),
                outputs,
                nbytes=0,
                channels=plan.channels,
                seconds=settings.seconds,
                call_hash=call_hash(digest, self.turn),
            )
        event = self._done[self.slot] = self._mark()
        self.turn += 1
        return event

    def _range(self, outputs: Sequence[Tensor]) -> str:
        text = f"{self.op}, output of {sum(each.nbytes for each in outputs)} bytes"
        return range_of_call(text, self.lane.device.type, self.rank, self.world)

    def _issue(self, plan: Plan, bound: Bound, settings: Settings) -> None:
        workspace, streams = self.lane.workspace, self.lane.streams
        if not settings.transforms:
            kept = self.lane.kept(self.slot, self.nbytes, bound.variant)
            script = kept.script_by(lambda: workspace.script(plan, bound.at, bound.tensors, (), bound.work, streams))
            if script is not None:
                script.run(self.op, [*bound.tensors.values()], {} if script.complete else ranged(bound.table))
                return
        copy = partial(self._copy, bound)
        functions: Table = ranged({"publish": copy, "pull": copy, **bound.table, **workspace.steps()})
        for transform in settings.transforms:
            functions = transform(plan, functions)
        execute(plan, functions, streams)

    def _copy(self, bound: Bound, step: Step) -> None:
        target, source = bound.at(step.writes[0]), bound.at(step.reads[0])
        if target.data_ptr() != source.data_ptr():  # the caller may have written it into the slot
            self.backend.copy(target, source)

    @contextmanager
    def beside(self, *tensors: Tensor) -> Iterator[None]:
        """Make the call in this block without making the current stream wait for it. The current stream has to wait for
        the event that `call` returns.

        The call has a stream of its own, which starts with the work that the current stream has so far. Without it, the
        waits for peers would hold up whatever is enqueued later. On CPU nothing changes.

        Args:
            tensors: the input and the output. The caller may drop them at once: their memory is not reused before the
                call has ended.

        Raises:
            RuntimeError: see `call`.
        """
        self._require_possible()
        side = self._side
        if side is None:
            yield
            return
        caller = self._current_stream()
        side.wait_stream(caller)
        try:
            with torch.get_device_module(self.device).stream(side):
                yield
                for tensor in tensors:
                    self.backend.keep_for_current_stream(tensor)
        except BaseException:
            with suppress(RuntimeError):  # the device has failed too: there is nothing to join
                caller.wait_stream(side)
            raise

    @cached_property
    def _side(self) -> Any:
        return self.backend.stream_beside(self.device)

    def _require_possible(self) -> None:
        """Raise RuntimeError if no call is possible now."""
        if self.lane.workspace.capturing():
            raise RuntimeError(
                f"{self.op}: slots cannot be used in a CUDA graph. FSDP2 fills a slot before the call, and in a replay "
                "peers may still read the slot. Capture parts of the model that gather and reduce nothing, or do not "
                "call symm_overlap.fsdp.apply."
            )
        if self.lane.broken is not None:
            raise RuntimeError(
                f"{self.op}: the ranks of group {self.lane.group_name!r} are out of step since a call failed "
                f"({self.lane.broken}). To go on, create the model anew on every rank, and call "
                "symm_overlap.fsdp.apply(model) again: torch's own state of the failed step differs between ranks too."
            )
