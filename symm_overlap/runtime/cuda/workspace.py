"""The workspace of a lane on CUDA: torch's symmetric memory, and the signals of csrc/cuda.

In a CUDA graph, the workspace and the half of it that a call uses are fixed at capture. The calls of a graph alternate
among themselves, and so do the calls that are not captured. `signals` describes what keeps the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C
from ..._torch import SymmetricMemory, resolve_group, symm_mem
from ...plan import Plan, Region, Step, Streams
from ..freeing import free_kept, let_go
from ..script import Script
from ..symmetric import half_size, on_every_rank, place_in_half, rendezvous
from ..work import WorkOf
from .signals import SLEEP_CYCLES, CudaSignals
from .streams import CudaStreams

_FEWEST_CHANNELS = 8  # more than any op's plan needs, so that a lane's signals are created only once


class MappedMemory:
    """The memory of a workspace on every rank, mapped here. It may go away at any time."""

    def __init__(self, tensor: Tensor, handle: SymmetricMemory, device: torch.device) -> None:
        self.tensor, self.handle, self._device = tensor, handle, device

    def __del__(self) -> None:
        let_go((self.tensor, self.handle), self._device)


class _Guard:
    """Hold a lock, with the lane's device as the current device, for steps that Python runs."""

    def __init__(self, lock: AbstractContextManager[object], device: torch.device) -> None:
        self._lock, self._scope = lock, torch.cuda.device(device)  # one scope for all calls, as the lock protects it

    def __enter__(self) -> None:
        self._lock.__enter__()
        try:
            self._scope.__enter__()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._scope.__exit__(*error)
        finally:
            self._lock.__exit__(None, None, None)


class CudaWorkspace:
    """See `symm_overlap.runtime.backend.Workspace`.

    Args:
        lane, tag: the lane's index, and its name in the rendezvous of its ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, lane: int, tag: str) -> None:
        self._group_name, self._device, self._index, self._tag = group.group_name, device, lane, tag
        self.half = 0
        self.channels = 0
        self._signals: CudaSignals | None = None
        self._memory: MappedMemory
        # By the identity of the memory: more channels alone also mean new memory, of the same size.
        self._captured: dict[int, tuple[MappedMemory, CudaSignals]] = {}
        self._captured_turn = 0
        self._is_captured = False  # the current call

    def guarded(self, lock: AbstractContextManager[object]) -> AbstractContextManager[object]:
        """See `Workspace.guarded`."""
        return _Guard(lock, self._device)

    def capturing(self) -> bool:
        """See `Workspace.capturing`."""
        found: bool = _C.capturing(self._device.index)
        return found

    def require_preparable(self, what: str) -> None:
        """See `Workspace.require_preparable`."""
        if self.capturing():
            from ..lane import NotPreparedError

            raise NotPreparedError(
                f"lane {self._index} of group {self._group_name!r}: {what}, and a CUDA graph is being captured. Before "
                "the capture, make the same call inside a block: with symm_overlap.prepare():"
            )

    def require_capturable(self, what: str) -> None:
        """See `Workspace.require_capturable`. gloo's collectives synchronise the host, so they cannot be captured."""
        if self.capturing() and resolve_group(self._group_name)._get_backend(self._device).name() == "gloo":
            from ..lane import NotCapturedError

            raise NotCapturedError(
                f"{what} uses torch.distributed with gloo, whose collectives cannot be captured in a CUDA graph: force "
                'a path of this package, such as symm_overlap.force_path("pipelined"), or use a group with NCCL'
            )

    def grow(self, nbytes: int, channels: int) -> None:
        """See `Workspace.grow`.

        Raises:
            RuntimeError: there is not enough memory, on this rank or (`torch.distributed.DistBackendError`) on another.
        """
        half, group = half_size(nbytes), resolve_group(self._group_name)

        def room() -> Tensor:
            # The old memory is freed after every rank has come to the rendezvous. By then no rank has a kernel that
            # uses it.
            torch.cuda.synchronize(self._device)
            free_kept(self._device)
            tensor: Tensor = symm_mem.empty(2 * half, dtype=torch.uint8, device=self._device)
            return tensor

        tensor = on_every_rank(room, group, self._tag)
        handle, signals, most = rendezvous(tensor, group), self._signals, self.channels
        if channels > most:
            most = max(_FEWEST_CHANNELS, channels)
            signals = CudaSignals.create(group, self._device, lane=self._index, tag=self._tag, channels=most)
        self._memory, self.half = MappedMemory(tensor, handle, self._device), half
        self._signals, self.channels = signals, most

    def view(self, rank: int, parity: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Workspace.view`."""
        return self.place(rank, place_in_half(self.half, parity, offset, shape, dtype), shape, dtype)

    def place(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Workspace.place`. Raises RuntimeError if the tensor would end beyond the workspace."""
        return self._memory.handle.get_buffer(rank, tuple(shape), dtype, offset // dtype.itemsize)

    def memory(self) -> object:
        """See `Workspace.memory`."""
        return self._memory

    def begin(self, op: str, seconds: float, call_hash: int, number: int, by_kernels: bool = False) -> None:
        """See `Workspace.begin`. Before the workspace is first allocated, there are no signals to prepare."""
        if self._signals is None:
            return
        self._is_captured = self._signals.begin(op, seconds, call_hash, number, by_kernels)
        if self._is_captured:
            # Replays go on to use this workspace and these signals even after the lane has new ones, so they are kept.
            self._captured[id(self._memory)] = self._memory, self._signals

    def take_half(self, number: int) -> int:
        """See `Workspace.take_half`.

        The first call of a graph uses the same half on every rank, however many calls each rank has captured before.
        Their numbers may differ, since some captures may have been abandoned.
        """
        assert self._signals is not None
        captured = self._is_captured
        try:
            first = self._signals.barrier_around_replays()
        except RuntimeError as error:
            if not captured:
                raise
            from ..lane import CaptureFailedError

            raise CaptureFailedError(str(error)) from error
        if not captured:
            return number % 2
        self._captured_turn = 0 if first else self._captured_turn + 1
        return self._captured_turn % 2

    def steps(self) -> dict[str, Callable[[Step], object]]:
        """See `Workspace.steps`."""
        signals = self._signals
        assert signals is not None
        return {
            "signal": lambda step: signals.signal(step.peers, step.channel),  # type: ignore[arg-type]
            "wait": lambda step: signals.wait(step.peers, step.channel),  # type: ignore[arg-type]
            "barrier": lambda step: signals.barrier(step.channel),  # type: ignore[arg-type]
            "sleep": lambda step: signals.sleep(SLEEP_CYCLES),
        }

    def script(
        self,
        plan: Plan,
        at: Callable[[Region], Tensor],
        tensors: Mapping[str, Tensor],
        operands: Sequence[Tensor],
        work: WorkOf,
        streams: Streams,
    ) -> Script:
        """See `Workspace.script`."""
        assert self._signals is not None
        assert isinstance(streams, CudaStreams)
        caller, *others = plan.streams
        driver = self._signals.driver
        driver.reserve_events(plan.program.events)
        sides = streams.side_streams(others)
        numbers = {caller: 0, **{name: driver.number_of(side.cuda_stream) for name, side in sides.items()}}
        return Script(driver, plan, at, tensors, operands, work, self._holds, numbers, self._new_program(driver))

    def _new_program(self, driver: _C.CudaDriver) -> _C.Program:
        """Return an empty program. A benchmark may override this to issue copies in another way."""
        return _C.Program()

    def _holds(self, tensor: Tensor) -> bool:
        """True if a tensor is stored in some rank's workspace. It then keeps its address until the workspace grows."""
        begins = [self.place(rank, 0, (1,), torch.uint8).data_ptr() for rank in range(self._memory.handle.world_size)]
        return any(begin <= tensor.data_ptr() < begin + 2 * self.half for begin in begins)

    def end(self, outputs: Sequence[Tensor], flags: _C.Flags | None) -> int:
        """See `Workspace.end`.

        A call that is only captured has not used its half. If it were counted, the next call would use the same half as
        the last call that ran, which a peer may still be reading.
        """
        assert self._signals is not None
        return int(self._signals.end(outputs, flags))

    def give_up(self, op: str) -> None:
        """See `Workspace.give_up`."""
        if self._signals is not None:
            with suppress(RuntimeError):  # CUDA itself has failed
                self._signals.give_up(op)

    def why_gone(self, peer: int) -> str:
        """See `Workspace.why_gone`."""
        return _C.death_of(self._group_name, peer)
