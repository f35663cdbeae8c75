"""The workspace of a lane on CPU: memory shared by the ranks' processes, with the epochs next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C
from ..._torch import SymmetricMemory, symm_mem
from ...plan import Plan, Region, Step, Streams
from ..script import Script
from ..symmetric import half_size, place_in_half
from ..work import WorkOf

_CPU = torch.device("cpu")


@lru_cache(maxsize=64)
def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _nothing_described(step: Step) -> None:
    return None


class CpuWorkspace:
    """See `symm_overlap.runtime.backend.Workspace`.

    Args:
        tag: names the lane in the rendezvous of its ranks.
        native: whether scripts may compute with the functions of csrc/cpu, without calling the back end.
    """

    def __init__(self, group: dist.ProcessGroup, tag: str, native: bool) -> None:
        self._group_name, self._tag, self._native = group.group_name, tag, native
        self.half = 0
        self.channels = 0
        self._op = ""
        self._handle: SymmetricMemory
        self._lane: _C.CpuLane
        self._driver: _C.CpuDriver

    def guarded(self, lock: AbstractContextManager[object]) -> AbstractContextManager[object]:
        """Return ``lock``: nothing else is needed."""
        return lock

    def capturing(self) -> bool:
        """Return False: nothing is captured."""
        return False

    def require_preparable(self, what: str) -> None:
        """Never raises: a workspace on CPU can always grow."""

    def require_capturable(self, what: str) -> None:
        """Never raises: nothing is captured on CPU."""

    def grow(self, nbytes: int, channels: int) -> None:
        """See `Workspace.grow`. The tag keeps apart lanes that grow at the same time in several threads.

        Raises:
            RuntimeError: there is not enough memory, on this rank or (`torch.distributed.DistBackendError`) on another.
        """
        half = half_size(nbytes)
        try:
            tensor: Tensor = symm_mem.empty(2 * half, dtype=torch.uint8, device=_CPU)
        except RuntimeError as error:  # otherwise the peers would wait for this rank
            _C.refuse_rendezvous(self._group_name, self._tag, str(error))
            raise
        _C.rendezvous(tensor, self._group_name, self._tag)
        handle = symm_mem.rendezvous(tensor, self._group_name)
        lane = _C.CpuLane(tensor, self._group_name)
        self._tensor, self._handle, self._lane, self.half = tensor, handle, lane, half
        self._driver = _C.CpuDriver(lane)
        self.channels = handle.signal_pad_size // 4 // handle.world_size  # one word of torch's pad each

    def view(self, rank: int, parity: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Workspace.view`."""
        return self.place(rank, place_in_half(self.half, parity, offset, shape, dtype), shape, dtype)

    def place(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Workspace.place`. Raises RuntimeError if the tensor would end beyond the workspace."""
        return self._handle.get_buffer(rank, tuple(shape), dtype, offset // dtype.itemsize)

    def memory(self) -> object:
        """See `Workspace.memory`."""
        return self._tensor, self._handle

    def begin(self, op: str, seconds: float, call_hash: int, number: int, by_kernels: bool = False) -> None:
        """See `Workspace.begin`. Before the workspace is first allocated, there are no signals to prepare."""
        self._op = op
        if self.half:
            self._lane.begin(_milliseconds(seconds), call_hash, number)

    def take_half(self, number: int) -> int:
        """See `Workspace.take_half`."""
        return number % 2

    def steps(self) -> dict[str, Callable[[Step], object]]:
        """See `Workspace.steps`."""
        return {"signal": self._signal, "wait": self._wait, "barrier": self._barrier}

    def _signal(self, step: Step) -> None:
        for peer in step.peers:
            self._lane.signal(peer, step.channel)  # type: ignore[arg-type]

    def _wait(self, step: Step) -> None:
        try:
            for peer in step.peers:
                self._lane.wait(peer, step.channel)  # type: ignore[arg-type]
        except dist.DistBackendError as error:
            raise dist.DistBackendError(f"{self._op}: {error}") from None

    def _barrier(self, step: Step) -> None:
        try:
            self._lane.barrier(step.channel)  # type: ignore[arg-type]
        except dist.DistBackendError as error:
            raise dist.DistBackendError(f"{self._op}: {error}") from None

    def script(
        self,
        plan: Plan,
        at: Callable[[Region], Tensor],
        tensors: Mapping[str, Tensor],
        operands: Sequence[Tensor],
        work: WorkOf,
        streams: Streams,
    ) -> Script | None:
        """See `Workspace.script`."""
        if len(plan.streams) > 1:
            return None
        described = work if self._native else _nothing_described
        return Script(self._driver, plan, at, tensors, operands, described, self._holds, {plan.streams[0]: 0})

    def _holds(self, tensor: Tensor) -> bool:
        """True if a tensor is stored in some rank's workspace. It then keeps its address until the workspace grows."""
        size, at = 2 * self.half, tensor.data_ptr()
        return any(begin <= at < begin + size for begin in self._handle.buffer_ptrs)

    def end(self, outputs: Sequence[Tensor], flags: _C.Flags | None) -> int:
        """See `Workspace.end`. The outputs need no treatment: if a wait had failed, it would have raised."""
        return 1

    def give_up(self, op: str) -> None:
        """See `Workspace.give_up`."""
        if self.half:
            with suppress(RuntimeError):  # the group no longer exists
                self._lane.give_up()

    def why_gone(self, peer: int) -> str:
        """See `Workspace.why_gone`."""
        return self._lane.why_gone(peer) if self.half else _C.death_of(self._group_name, peer)
