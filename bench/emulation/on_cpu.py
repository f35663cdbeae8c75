"""The workspace of an emulated lane on CPU. Phantoms are in the memory of this process, and streams are threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor

from bench.emulation.mirror import HostSignals
from bench.emulation.phantoms import PhantomMemory
from symm_overlap import _C
from symm_overlap.plan import Plan, Region, Step, Streams
from symm_overlap.runtime.symmetric import half_size
from symm_overlap.runtime.work import WorkOf


class EmulatedCpuWorkspace:
    """See `symm_overlap.runtime.backend.Workspace`. The streams of the CPU backend run every step, as for any plan with
    several streams.
    """

    def __init__(self, world: int) -> None:
        self.half = self.channels = 0
        self.phantoms: PhantomMemory
        self._world, self._signals, self._seconds = world, HostSignals(world), 0.0

    def guarded(self, lock: AbstractContextManager[object]) -> AbstractContextManager[object]:
        """Return the lock itself: it is enough here."""
        return lock

    def require_preparable(self, what: str) -> None:
        """Accept: this workspace can always grow."""

    def require_capturable(self, what: str) -> None:
        """Accept: nothing is captured on CPU."""

    def capturing(self) -> bool:
        """Nothing is captured on CPU."""
        return False

    def grow(self, nbytes: int, channels: int) -> None:
        """See `Workspace.grow`."""
        self.half, self.channels = half_size(nbytes), channels
        self.phantoms = PhantomMemory(self._world, 2 * self.half, torch.device("cpu"))

    def view(self, rank: int, parity: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Workspace.view`."""
        assert offset + prod(shape) * dtype.itemsize <= self.half
        return self.place(rank, parity * self.half + offset, shape, dtype)

    def place(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Workspace.place`."""
        return self.phantoms.get_buffer(rank, shape, dtype, offset // dtype.itemsize)

    def memory(self) -> object:
        """See `Workspace.memory`."""
        return self.phantoms

    def begin(self, op: str, seconds: float, call_hash: int, number: int, by_kernels: bool = False) -> None:
        """Keep the deadline. There are no peers to notify of the call."""
        self._seconds = seconds

    def take_half(self, number: int) -> int:
        """See `Workspace.take_half`."""
        return number % 2

    def steps(self) -> dict[str, Callable[[Step], object]]:
        """See `Workspace.steps`."""
        signals = self._signals
        return {
            "signal": lambda step: signals.signal(step.peers, step.channel),  # type: ignore[arg-type]
            "wait": lambda step: signals.wait(step.peers, step.channel, self._seconds),  # type: ignore[arg-type]
            "barrier": lambda step: signals.barrier(step.channel, self._seconds),  # type: ignore[arg-type]
        }

    def script(
        self,
        plan: Plan,
        at: Callable[[Region], Tensor],
        tensors: Mapping[str, Tensor],
        operands: Sequence[Tensor],
        work: WorkOf,
        streams: Streams,
    ) -> None:
        """Return None: scripts on CPU need ranks that are processes."""

    def end(self, outputs: Sequence[Tensor], flags: _C.Flags | None) -> int:
        """Report success: a failed wait would have raised."""
        return 1

    def give_up(self, op: str) -> None:
        """See `Workspace.give_up`."""
        self._signals.give_up()

    def why_gone(self, peer: int) -> str:
        """Return an empty string: a phantom never ends."""
        return ""
