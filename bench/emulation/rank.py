"""The one real rank of an emulated group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bench.emulation.link import DevicePacer, HostPacer, Link, Pacer, across
from bench.emulation.on_cpu import EmulatedCpuWorkspace
from bench.emulation.phantoms import PhantomMemory
from bench.harness.launch import Rank
from bench.harness.peerless import without_peers
from symm_overlap.runtime import GroupState, Lane, Workspace, backend_of, state_of


class NobodyToWaitFor:
    """The start line of a single rank."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True)
class EmulatedRank(Rank):
    """Rank 0 of ``world``, whose peers are phantoms behind a link.

    Attributes:
        link, pacer: the link, and its clock.
    """

    link: Link
    pacer: Pacer

    def all(self, value: Any) -> list[Any]:
        """Return the values of all real ranks: only this one's."""
        return [value]

    @property
    def state(self) -> GroupState:
        """The state of the emulated group."""
        return state_of(self.group)

    def lane(self, index: int) -> Lane:
        """Return a lane of the emulated group."""
        return self.state.lane(self.group, self.device, index)

    def phantoms(self, lane: Lane) -> PhantomMemory:
        """Return the memory of a lane that has been used."""
        found: PhantomMemory = lane.workspace.phantoms  # type: ignore[attr-defined]
        return found

    def copy(self, target: Tensor, source: Tensor, from_peer: bool = True) -> None:
        """Copy from or to a phantom, across the link. The host does not wait, not even if one side is host memory."""
        pacer = self.pacer
        if not isinstance(pacer, DevicePacer):
            across(self.link, pacer, target, source)
        elif self.link.bytes_per_second is None or pacer.crossing.exact:
            target.copy_(source, non_blocking=True)
        else:
            pacer.crossing.cross(target.nbytes, from_peer)

    def exactly(self) -> AbstractContextManager[object]:
        """Return a context in which copies move their data, whatever they do otherwise."""
        return self.pacer.exactly() if isinstance(self.pacer, DevicePacer) else nullcontext()


@contextmanager
def emulated(world: int, device: str, link: Link) -> Iterator[EmulatedRank]:
    """Inside, ops run on rank 0 of a group of ``world`` ranks. The other ranks are phantoms. On a GPU, a
    stream of its own is current.

    Args:
        device: "cpu" or "cuda". On CPU the plans are also those of GPUs, and threads replace the streams.
    """
    where, pacer = _device_and_pacer(device, link)
    backend = backend_of(where.type)
    plainly = backend.copy
    rank = EmulatedRank(0, world, where, "fake", NobodyToWaitFor(), link, pacer)  # type: ignore[arg-type]
    lanes: list[Workspace] = []

    def workspace(group: dist.ProcessGroup, device: torch.device, lane: int, tag: str) -> Workspace:
        made: Workspace
        if isinstance(pacer, DevicePacer):
            from bench.emulation.on_cuda import EmulatedCudaWorkspace

            made = EmulatedCudaWorkspace(group, device, lane, tag, link, pacer)
        else:
            made = EmulatedCpuWorkspace(group.size())
        lanes.append(made)
        return made

    def copy(target: Tensor, source: Tensor) -> object:
        # Copies of steps that Python runs: all steps on CPU, and those of fused plans on GPUs.
        used = [lane.phantoms for lane in lanes if lane.half]  # type: ignore[attr-defined]
        to_peer, from_peer = (any(memory.is_phantom(each.data_ptr()) for memory in used) for each in (target, source))
        if to_peer or from_peer:
            rank.copy(target, source, from_peer)
            return None
        return plainly(target, source)

    # A link without a pace in device memory needs no patch, so that the host spends no time on it.
    as_it_is = link.bytes_per_second is None and not link.on_host
    crossing: AbstractContextManager[object] = nullcontext() if as_it_is else mock.patch.object(backend, "copy", copy)
    stream = torch.cuda.stream(torch.cuda.Stream(where)) if where.type == "cuda" else nullcontext()
    with without_peers(0, world, where.type, workspace), crossing, stream:
        rank.state.devices[where.type] = (backend.described(where),) * world  # costs are looked up by their names
        yield rank


def _device_and_pacer(device: str, link: Link) -> tuple[torch.device, Pacer]:
    if device == "cpu":
        return torch.device("cpu"), HostPacer()
    # By default, the streams of all lanes share 8 hardware queues, in which work of one stream may block the work that
    # another stream waits for. CUDA reads this variable when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    torch.cuda.set_device(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        return torch.device("cuda", 0), DevicePacer(torch.device("cuda", 0), link.bytes_per_second)
