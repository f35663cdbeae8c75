"""The signals of phantoms: every rank does what rank 0 does, at the same time, so those of rank 0 are raised for them.

Plans are symmetric: what rank 0 tells rank q on a channel, rank W - q tells rank 0 on that channel at that moment. So
where rank 0 signals rank q, the slot that is written is that of rank W - q at rank 0 itself. Nothing is launched that a
real rank does not launch, and every wait is a real one. What is not emulated is that ranks differ: a phantom is never
late, and never early.
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
    """The phantom that tells rank 0 something when rank 0 tells ``peer``."""
    return (world - peer) % world


class HostSignals:
    """Signals of rank 0 and its phantoms between threads of this process."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._raised: Counter[tuple[int, int]] = Counter()  # by source and channel
        self._awaited: Counter[tuple[int, int]] = Counter()
        self._changed = threading.Condition()
        self._given_up = False

    def signal(self, peers: tuple[int, ...], channel: int) -> None:
        """Raise what the phantoms raise when rank 0 signals ``peers``."""
        with self._changed:
            self._raised.update((mirrored(peer, self._world), channel) for peer in peers)
            self._changed.notify_all()

    def wait(self, peers: tuple[int, ...], channel: int, seconds: float) -> None:
        """Wait for the next signal of each peer.

        Raises:
            DistBackendError: past the deadline, or once `give_up` has been called.
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
        """All ranks come at once."""
        peers = tuple(range(1, self._world))
        self.signal(peers, -1 - channel)  # channels of their own
        self.wait(peers, -1 - channel, seconds)

    def give_up(self) -> None:
        """End every wait, now and later."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()


class ControlMemory:
    """The control blocks of a lane on a GPU (csrc/common/control_block.h): those of the peers are shifted views of the
    own one, so that the slot of rank 0 in the block of peer q is the slot of rank W - q in the own one.

    Only slots are where they should be. Announcements of calls are not, so none may be made; nor are notices of
    failures, for which there is room behind the block. The same holds for the host blocks.

    Args:
        channels: of the lane, with that of captured calls.

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
        del shape, dtype  # only its address is asked for
        return self._memory[self._shifts[peer] :]

    def host_blocks(self) -> list[Tensor]:
        """The host blocks of rank 0 and its phantoms, in pinned memory: streams then signal by memory operations."""
        memory = self._zeros(pin_memory=True)
        return [memory[shift:][: self._words] for shift in self._shifts]

    def _zeros(self, **where: Any) -> Tensor:
        return torch.zeros(self._words + max(self._shifts), dtype=torch.int32, **where)
