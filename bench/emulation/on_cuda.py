"""The workspace of an emulated lane on a GPU. It differs from that of any lane only in its memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bench.emulation.link import DevicePacer, Link, PacedProgram
from bench.emulation.mirror import ControlMemory
from bench.emulation.phantoms import PhantomMemory
from symm_overlap import _C
from symm_overlap.runtime.cuda.memory_operations import stream_waits
from symm_overlap.runtime.cuda.signals import CudaSignals
from symm_overlap.runtime.cuda.workspace import CudaWorkspace, MappedMemory
from symm_overlap.runtime.symmetric import half_size

_CHANNELS = 8  # more than any plan has, so that signals are created only once


class EmulatedCudaWorkspace(CudaWorkspace):
    """See `CudaWorkspace`. The C++ driver issues every step that needs no Python, as on any lane.

    Args:
        pacer: the link itself, which all lanes share.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, lane: int, tag: str, link: Link, pacer: DevicePacer
    ) -> None:
        super().__init__(group, device, lane, tag)
        self._world, self._link, self._pacer = group.size(), link, pacer
        self.phantoms: PhantomMemory

    def grow(self, nbytes: int, channels: int) -> None:
        """See `Workspace.grow`."""
        torch.cuda.synchronize(self._device)
        self.half = half_size(nbytes)
        self.phantoms = PhantomMemory(self._world, 2 * self.half, self._device, self._link.on_host)
        self._memory = MappedMemory(self.phantoms.ranks[0], self.phantoms, self._device)  # type: ignore[arg-type]
        if channels > self.channels:
            self.channels = max(_CHANNELS, channels)
            control = ControlMemory(self._world, self.channels + 1, self._device)
            torch.cuda.synchronize(self._device)  # the block must be zero before the first signal
            self._signals = CudaSignals(
                control.control,
                control,  # type: ignore[arg-type]
                group_name=self._group_name,
                lane=self._index,
                channels=self.channels,
                hosts=control.host_blocks() if stream_waits(self._device, shared=False) else (),
            )

    def begin(self, op: str, seconds: float, call_hash: int, number: int, by_kernels: bool = False) -> None:
        """See `Workspace.begin`. Phantoms announce no calls, so there is nothing to compare."""
        super().begin(op, seconds, 0, number, by_kernels)

    def _new_program(self, driver: _C.CudaDriver) -> _C.Program:
        driver.emulate_link(self._pacer.crossing, self.phantoms.ranks[1:])
        return PacedProgram(self._link)
