"""The signals of phantoms. Phantoms do the same as rank 0 at the same time, so each signal of rank 0 is mirrored to it.

Plans are symmetric: when rank 0 signals rank q on a channel, rank W - q signals rank 0 on that channel at the same
moment. So when rank 0 signals rank q, the slot that is written is that of rank W - q at rank 0 itself. Rank 0 launches
nothing that a real rank does not launch, and every wait is real. Differences between ranks are not emulated: a phantom
is never late and never early.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from symm_overlap import _C


def mirrored(peer: int, world: int) -> int:
    """Return the phantom that signals rank 0 when rank 0 signals ``peer``."""
    return (world - peer) % world


class HostSignals:
    """The signals between rank 0 and its phantoms, for streams that are threads of this process."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._raised: Counter[tuple[int, int]] = Counter()  # number of signals by source and channel
        self._awaited: Counter[tuple[int, int]] = Counter()
        self._changed = threading.Condition()
        self._given_up = False

    def signal(self, peers: tuple[int, ...], channel: int) -> None:
        """Raise the signals that the phantoms raise when rank 0 signals ``peers``."""
        with self._changed:
            self._raised.update((mirrored(peer, self._world), channel) for peer in peers)
            self._changed.notify_all()

    def wait(self, peers: tuple[int, ...], channel: int, seconds: float) -> None:
        """Wait for the next signal of each peer.

        Raises:
            DistBackendError: the deadline has passed, or `give_up` was called.
        """
        with self._changed:
            for peer in peers:
                source = peer, channel
                self._awaited[source] += 1
                came = self._changed.wait_for(lambda source=source: self._is_there(source), seconds)  # type: ignore[misc]
                if self._given_up or not came:
                    why = "the call has failed" if self._given_up else f"not raised in {seconds:g} s"
                    raise dist.DistBackendError(f"emulated signal of rank {peer} on channel {channel}: {why}")

    def _is_there(self, source: tuple[int, int]) -> bool:
        return self._given_up or self._raised[source] >= self._awaited[source]

    def barrier(self, channel: int, seconds: float) -> None:
        """Signal all peers and wait for them. All ranks arrive at the same time."""
        peers = tuple(range(1, self._world))
        self.signal(peers, -1 - channel)  # negative: barriers have their own channels
        self.wait(peers, -1 - channel, seconds)

    def give_up(self) -> None:
        """Let all current and later waits fail."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()


class ControlMemory:
    """The control blocks of a lane on a GPU (csrc/common/control_block.h). The peers' blocks are shifted views of rank
    0's block, so that the slot of rank 0 in the block of peer q is the slot of rank W - q in the block of rank 0.

    Only the slots are at their right places. Announcements of calls are not, so calls must not be announced. Notices of
    failures are not either. They are written into spare memory behind the block. The same holds for the host blocks.

    Args:
        channels: the channels of the lane, including that of captured calls.

    Attributes:
        rank, world_size: as in torch's handle of symmetric memory.
        control: the block of rank 0.
    """

    rank = 0

    def __init__(self, world: int, channels: int, device: torch.device) -> None:
        self.world_size = world
        self._shifts = [
            _C.CudaLane.slot(world, channels, mirrored(peer, world), 0) - _C.CudaLane.slot(world, channels, 0, 0)
            for peer in range(world)
        ]
        self._words = _C.CudaLane.control_words(world, channels)
        self._memory = self._zeros(device=device)
        self.control = self._memory[: self._words]

    def get_remote_tensor(self, peer: int, shape: list[int], dtype: torch.dtype) -> Tensor:
        """See torch's ``_SymmetricMemory.get_remote_tensor``."""
        del shape, dtype  # only the address of the result is used
        return self._memory[self._shifts[peer] :]

    def host_blocks(self) -> list[Tensor]:
        """Return the host blocks of rank 0 and its phantoms, in pinned memory, for signals by memory operations."""
        memory = self._zeros(pin_memory=True)
        return [memory[shift:][: self._words] for shift in self._shifts]

    def _zeros(self, **where: Any) -> Tensor:
        return torch.zeros(self._words + max(self._shifts), dtype=torch.int32, **where)
