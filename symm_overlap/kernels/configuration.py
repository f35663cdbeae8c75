"""Which tiles a fused matmul has: a pure function of shape, dtype and architecture, so that it is tested anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

INTERPRETER = 0
"""The "architecture" of Triton's interpreter on a CPU, which takes its time by the operation and not by the element."""

RESERVED_SHARED_BYTES = 2048
"""Bytes of shared memory of a multiprocessor that a matmul leaves to the small kernels beside it: every block reserves
1 KiB for the system, the matmul's own too."""

SHARED_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Shared memory of a multiprocessor, by architecture (compute capability times 10)."""


@dataclass(frozen=True)
class Configuration:
    """How a fused matmul is cut into tiles.

    Attributes:
        tile_m, tile_n, tile_k: rows and columns of a tile of the product, and the step along K.
        group: rows of tiles that are visited together, column by column, so that they share the weight in the cache.
        warps, stages: of a program; 32 threads each, and how many steps along K are loaded ahead.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    group: int
    warps: int
    stages: int

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory that the operands' tiles of all stages take."""
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * itemsize


def configure(rows: int, n: int, k: int, dtype: torch.dtype, architecture: int) -> Configuration:
    """The configuration of a matmul whose rows belong to ranks, ``rows`` to each.

    Small parts get small tiles: a tile never has more rows than the next power of two of a rank's part, since the part
    of a rank is what has to arrive before its tiles can start.

    Args:
        rows: of one rank's part.
        n, k: columns of the product, and the length that is contracted.
        architecture: compute capability times 10, such as 90; `INTERPRETER` on a CPU.

    Raises:
        ValueError: no kernel is known for the architecture.
    """
    if architecture == INTERPRETER:
        return Configuration(_fitting(rows, 16), _fitting(n, 32), _fitting(k, 64), 1, 4, 1)
    if architecture not in SHARED_BYTES:
        raise ValueError(f"architecture is {architecture}: kernels are known for {', '.join(map(str, SHARED_BYTES))}")
    size = dtype.itemsize
    # 128 bytes of K in a step: a row of the shared memory that tensor cores read.
    tile_k = max(16, 128 // size)
    tile_m = _fitting(rows, 128)
    # Float32 and float64 multiply on plain cores, with the operands in registers: larger tiles would spill.
    tile_n = _fitting(n, 64 if size >= 4 else 128 if architecture == 80 else 256)
    if size >= 4:
        tile_m, tile_k = min(tile_m, 64), 16
    elif tile_m * tile_n > 128 * 128 and rows * n < 132 * tile_m * tile_n:
        tile_n = 128  # more tiles than multiprocessors come before larger ones
    warps = 8 if tile_m * tile_n >= 128 * 256 else 4
    stages = 4
    configuration = Configuration(tile_m, tile_n, tile_k, _group(rows, tile_m), warps, stages)
    limit = SHARED_BYTES[architecture] - RESERVED_SHARED_BYTES
    while configuration.shared_bytes(size) > limit and stages > 2:
        stages -= 1
        configuration = Configuration(tile_m, tile_n, tile_k, _group(rows, tile_m), warps, stages)
    return configuration


def programs(multiprocessors: int) -> int:
    """How many programs of a persistent matmul are launched.

    One multiprocessor is left out. Signals and waits of the copy stream may be kernels, and a matmul that holds every
    register of every multiprocessor would keep out the very kernels that it waits for.
    """
    return max(1, multiprocessors - 1)


def _group(rows: int, tile_m: int) -> int:
    # Never over the border of a part: the first tiles of a group would wait for the rows of its last ones.
    return max(1, min(8, rows // tile_m))


def _fitting(size: int, most: int) -> int:
    """The smallest power of two from 16 on that covers ``size``, up to ``most``."""
    tile = 16
    while tile < size and tile < most:
        tile *= 2
    return tile
