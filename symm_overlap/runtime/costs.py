"""What operations cost on a device: a record of rates and times, and the predicted time of a matmul, a copy or a sum.

A matmul is cut into tiles. As many tiles run at a time as there are SMs; together they are a wave. The last wave is
only partly filled, and a small matmul does not fill even one wave. So a matmul cut into eight pieces can take far
longer than in one piece, and this decides whether chunks pay. The library chooses the shape of its tiles. It may also
split the contraction of a tile among several SMs, which then add up their results (split-K). The model assumes the
quickest of a few shapes and splits.

Every duration here is in seconds, every rate in units per second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """A tile shape, and the share of the device's rate that full waves of such tiles reach. Small tiles reload more."""

    rows: int
    columns: int
    share: float


class Device(NamedTuple):
    """The facts about a device that decide which costs it has.

    Attributes:
        name: the maker's name for it; "" if this machine has no such device.
        stream_waits: whether streams wait, and signal few peers, by memory operations, and not by kernels. True on GPUs
            unless something prevents it. Has no meaning on a CPU.
        kernels: whether fused kernels can be compiled for it. True on GPUs unless something prevents it.
    """

    name: str = ""
    stream_waits: bool = True
    kernels: bool = True

    def __str__(self) -> str:
        return self.name if self.stream_waits else f"{self.name}, kernels wait"


@dataclass(frozen=True, eq=False)
class DeviceCosts:
    """What operations cost on one device. Figures that nobody has measured are estimates, and are marked as such.

    Attributes:
        name: a word of the device's own name, such as "H100".
        sms: the number of SMs, which is how many tiles run at a time.
        tiles: the tile shapes that the matmul library has; splits: the numbers of parts into which it may cut the
            contraction.
        flops: for each dtype of the factors, the rate of large tiles, without the time of their epilogues.
        memory: bytes a second that kernels read and write in the device's memory; matmul_memory: the same for a matmul
            that takes as long as it takes to read its factors.
        epilogue: the length of a contraction that takes as long as the epilogue of a tile, which stores it.
        matmul_start: the additional time of a matmul, besides that of any kernel: its first loads and its last stores.
        copy: bytes a second that a copy engine moves from one peer; copy_start: the additional time of each copy.
        kernel: the additional time of a kernel besides its work, from the end of the previous kernel on its stream.
        signal: the time on its stream to post a signal; wait: the time to return from a wait that a kernel carries out;
            stream_wait: the same for a wait by a memory operation; flag: the time until a value written to memory is
            seen by a peer, or by another kernel.
        event: the time until a stream goes on after an event of another stream.
        turn: the additional time of each change between copies and waits on a stream that runs no kernels except
            signals and waits, and of its first step: the copy engine takes turns with what carries out the waits.
        host: the time in which the host issues one operation; host_matmul: the same for a matmul, which goes through
            torch.
        library: bytes a second that a rank receives by kernels, such as those of the vendor's collectives;
            library_start: the additional time of each of the vendor's collectives.
        held: the number of SMs that a wait takes away from the matmuls beside it.
        pieces: the rate of a series of matmuls, one for each chunk, as a share of the rate of one matmul of them all.
        fused: the rate of the persistent matmul of the path ``fused``, as a share of the library's rate.
        fused_measured: whether that rate was measured. Otherwise the path is not chosen on a prediction.
    """

    name: str
    sms: int
    tiles: tuple[Tile, ...]
    splits: tuple[int, ...]
    flops: Mapping[torch.dtype, float]
    memory: float
    matmul_memory: float
    epilogue: int
    matmul_start: float
    copy: float
    copy_start: float
    kernel: float
    signal: float
    wait: float
    stream_wait: float
    flag: float
    event: float
    turn: float
    host: float
    host_matmul: float
    library: float
    library_start: float
    held: int
    pieces: float
    fused: float
    fused_measured: bool

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
        beside: float = 0.0,
    ) -> tuple[float, float]:
        """Return the body and the tail of (m, k) @ (k, n), in seconds.

        During the body, the tiles fill the SMs. The tail is the rest: the part of the last wave that another kernel
        could fill, and the start of the kernel.

        Args:
            held: the number of SMs that something else occupies.
            parts: how many such matmuls one kernel computes, one after another. The body is the body of each part.
                There is one tail, after the last part, since the tiles of one part fill up the last wave of the part
                before it.
            late: whether the kernel waits for each part. Then all waves of the last part come after that wait.
            share: the share of the library's rate that the kernel reaches.
            beside: bytes that copies read and write in the same memory during each matmul.
        """
        free = max(1, self.sms - held)
        # A lower bound for any tiles: both factors are read, and the product is written. A kernel that computes many
        # parts reads without a pause.
        least = (m * k + k * n + m * n) * dtype.itemsize / (self.matmul_memory if parts == 1 else self.memory)
        least += beside / self.memory
        rate = self.flops.get(dtype, self.flops[torch.float32]) / self.sms
        best = math.inf, 0.0
        for tile, split in product(self.tiles, self.splits if parts == 1 else (1,)):
            count = -(-m // tile.rows) * -(-n // tile.columns) * split
            each = 2.0 * tile.rows * tile.columns * (k / split + self.epilogue) / (rate * tile.share * share)
            # The SMs that share a tile write partial results in 32 bits, which are then read and added.
            joined = 2 * split * m * n * 4 / self.memory if split > 1 else 0.0
            body = count / free * each + joined
            whole = -(-parts * count // free) * each + joined
            if late:
                whole = max(whole, (parts - 1) * body + -(-count // free) * each)
            best = min(best, (whole, body))
        whole, body = max(parts * least, best[0]), max(least, best[1])
        return body, max(0.0, whole - parts * body) + self.kernel + self.matmul_start

    def memory_kernel(self, nbytes: int) -> tuple[float, float]:
        """Return the body and the tail of a kernel that reads and writes ``nbytes`` in all, such as a copy or a sum."""
        return nbytes / self.memory, self.kernel

    def peer_copy(self, nbytes: int) -> float:
        """Return the time of a copy from a peer, by a copy engine."""
        return self.copy_start + nbytes / self.copy

    def collective(self, nbytes: int) -> float:
        """Return the time of a collective of the vendor's library in which every rank receives ``nbytes``."""
        return self.library_start + nbytes / self.library

    def meeting(self, nbytes: int) -> float:
        """Return the time of a kernel in which ranks meet and then read ``nbytes`` of their peers' memory."""
        return self.kernel + self.flag + nbytes / self.library


def costs_of(known: tuple[DeviceCosts, ...], device: Device) -> DeviceCosts:
    """Return the costs of a device, or those of the first known one if it has no record. Its costs of waits depend on
    `Device.stream_waits`.
    """
    found = record_of(known, device.name) or known[0]
    return _with_stream_waits(found) if device.stream_waits else found


def record_of(known: tuple[DeviceCosts, ...], name: str) -> DeviceCosts | None:
    """Return the record whose name is a word of a device's name; None if there is none."""
    return next((costs for costs in known if re.search(rf"\b{costs.name}\b", name)), None)


@lru_cache
def _with_stream_waits(costs: DeviceCosts) -> DeviceCosts:
    # Cached, so that it is the same object each time: records are looked up by identity.
    return replace(costs, wait=costs.stream_wait, held=0)
