"""What operations cost on a device: a record of rates and times, and how long a matmul, a copy or a sum then takes.

A matmul is cut into tiles, and as many of them run at a time as there are SMs: a wave. The last wave is partly filled,
and small matmuls fill not even one. So a matmul in eight pieces can take far longer than in one, which is what decides
whether chunks pay. The library chooses the shape of the tiles; here the quickest of a few shapes is taken for it.

Every duration here is in seconds, every rate in units per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """A shape of tiles, and the share of the device's rate that full waves of it reach: small ones reload more."""

    rows: int
    columns: int
    share: float


class Device(NamedTuple):
    """What decides which costs a device has.

    Attributes:
        name: what its maker calls it; "" where there is none here.
        stream_waits: whether streams signal and wait by memory operations, as they do on GPUs where nothing is in the
            way, and not by kernels. Means nothing on a CPU.
    """

    name: str = ""
    stream_waits: bool = True

    def __str__(self) -> str:
        return self.name if self.stream_waits else f"{self.name}, kernels wait"


@dataclass(frozen=True, eq=False)
class DeviceCosts:
    """What operations cost on one device. Figures that nobody has measured are estimates; the record says which.

    Attributes:
        name: as in the device's own name, such as "H100".
        sms: how many tiles run at a time.
        tiles: the shapes of tiles that the matmul library has.
        flops: for each dtype of the factors, the rate that large matmuls reach.
        memory: bytes a second that kernels read and write in the device's memory.
        copy: bytes a second that a copy engine moves from one peer; copy_start: what each copy takes besides.
        kernel: what a kernel takes besides its work, from the end of the one before it on its stream.
        signal: what posting a signal takes on its stream; wait: coming back from one that a kernel has waited for;
            stream_wait: from one that a memory operation has waited for; flag: until a value that is written to memory
            is seen by a peer, or by another kernel.
        event: until a stream goes on behind an event of another one.
        host: until the host has issued one operation.
        library: bytes a second that a rank receives by kernels, such as those of the vendor's collectives;
            library_start: what each collective of the vendor takes besides.
        kernels: the kinds of steps, besides those that compute, that are kernels: they need the SMs for a moment.
        held: SMs that a wait takes away from the matmuls beside it.
        fused: the rate of the persistent matmul of the path ``fused``, of that of the library's.
    """

    name: str
    sms: int
    tiles: tuple[Tile, ...]
    flops: Mapping[torch.dtype, float]
    memory: float
    copy: float
    copy_start: float
    kernel: float
    signal: float
    wait: float
    stream_wait: float
    flag: float
    event: float
    host: float
    library: float
    library_start: float
    kernels: frozenset[str]
    held: int
    fused: float

    def matmul(
        self,
        m: int,
        n: int,
        k: int,
        dtype: torch.dtype,
        held: int = 0,
        *,
        parts: int = 1,
        late: bool = False,
        share: float = 1.0,
    ) -> tuple[float, float]:
        """The body and the tail of (m, k) @ (k, n).

        During its body the tiles fill the SMs. The tail is what is left: the part of the last wave that another kernel
        could fill, and the start.

        Args:
            held: SMs that something else holds.
            parts: how many such matmuls one kernel makes, one after another. The body is that of each; the tail comes
                behind the last one, since tiles of one part fill up the last wave of the one before.
            late: whether each part has to be waited for. Then behind the last one there are all of its own waves.
            share: of the library's rate, what the kernel reaches.
        """
        free = max(1, self.sms - held)
        # Whatever the tiles: both factors are read, and the product is written.
        least = (m * k + k * n + m * n) * dtype.itemsize / self.memory
        rate = self.flops.get(dtype, self.flops[torch.float32]) / self.sms
        best = math.inf, 0.0
        for tile in self.tiles:
            count = -(-m // tile.rows) * -(-n // tile.columns)
            each = 2.0 * tile.rows * tile.columns * k / (rate * tile.share * share)
            body = count / free * each
            whole = -(-parts * count // free) * each
            if late:
                whole = max(whole, (parts - 1) * body + -(-count // free) * each)
            best = min(best, (whole, body))
        whole, body = max(parts * least, best[0]), max(least, best[1])
        return body, max(0.0, whole - parts * body) + self.kernel

    def memory_kernel(self, nbytes: int) -> tuple[float, float]:
        """The body and the tail of a kernel that reads and writes so many bytes in all, such as a copy or a sum."""
        return nbytes / self.memory, self.kernel

    def peer_copy(self, nbytes: int) -> float:
        """A copy from a peer, by a copy engine."""
        return self.copy_start + nbytes / self.copy

    def collective(self, nbytes: int) -> float:
        """A collective of the vendor's library in which every rank receives so many bytes."""
        return self.library_start + nbytes / self.library

    def meeting(self, nbytes: int) -> float:
        """A kernel in which ranks meet and then read so many bytes of their peers' memory."""
        return self.kernel + self.flag + nbytes / self.library


def costs_of(known: tuple[DeviceCosts, ...], device: Device) -> DeviceCosts:
    """The record whose name is a part of the device's name, the first one for a device that none is known for; with
    waits as the device has them.
    """
    found = next((costs for costs in known if costs.name in device.name), known[0])
    return _with_stream_waits(found) if device.stream_waits else found


@lru_cache
def _with_stream_waits(costs: DeviceCosts) -> DeviceCosts:
    # One and the same record each time: it is looked up by identity.
    return replace(costs, wait=costs.stream_wait, held=0, kernels=costs.kernels - {"signal"})
