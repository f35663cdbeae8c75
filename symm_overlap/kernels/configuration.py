"""The tiles of a fused matmul: a pure function of shape, dtype and architecture, so that it can be tested anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

INTERPRETER = 0
"""The "architecture" of Triton's interpreter on a CPU, whose time depends on the operations, not on the elements."""

_MULTIPROCESSORS = 132  # of an H100; other GPUs have about as many

_NARROW_RATE = 0.85
"""An estimate: FLOPs a second with tiles of 128 columns, relative to tiles of 256."""

RESERVED_SHARED_BYTES = 2048
"""Bytes of a multiprocessor's shared memory that a matmul leaves to the small kernels beside it. Every block, including
those of the matmul, reserves 1 KiB for the system.
"""

MOST_WEIGHTS = 4
"""The most weights that one launch multiplies with: query, key and value, and one more."""

SHARED_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Bytes of shared memory of a multiprocessor, by architecture (compute capability times 10)."""


@dataclass(frozen=True)
class Configuration:
    """How a fused matmul is cut into tiles.

    Attributes:
        tile_m, tile_n, tile_k: rows and columns of a tile of the product, and the step along K.
        group: how many rows of tiles are visited together, column by column, so that they share the weight in the
            cache.
        warps, stages: the number of warps of a program (32 threads each), and how many steps along K are loaded ahead.
        descriptors: whether tiles are loaded by tensor descriptors instead of pointers. One thread passes a descriptor
            to the copy unit (TMA) of its multiprocessor.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    group: int
    warps: int
    stages: int
    descriptors: bool = False

    def shared_bytes(self, itemsize: int) -> int:
        """Return the bytes of shared memory for the operands' tiles of all stages."""
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * itemsize


def require_known(architecture: int) -> None:
    """Raise ValueError if no kernel is known for an architecture."""
    if architecture != INTERPRETER and architecture not in SHARED_BYTES:
        raise ValueError(f"architecture is {architecture}: kernels are known for {', '.join(map(str, SHARED_BYTES))}")


def multiplies(dtype: torch.dtype, architecture: int) -> bool:
    """True if there are kernels for matmuls of this dtype. Tensor cores have 8-bit floats from architecture 90 on."""
    return dtype.itemsize > 1 or architecture == INTERPRETER or architecture >= 90


@lru_cache(maxsize=4096)  # called in every call of an op
def configure(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    architecture: int,
    *,
    total: int | None = None,
    all_rows: int | None = None,
    aligned: bool = True,
) -> Configuration:
    """Return the configuration of a matmul in which each rank has a part of ``rows`` rows.

    A tile never has more rows than the next power of two of a rank's part: the part of a rank has to arrive before its
    tiles can start, and the rows of a tile beyond the part are wasted.

    Args:
        rows: rows of one rank's part.
        n, k: columns of the product (of the widest one if there are several), and the contracted length.
        architecture: compute capability times 10, such as 90; `INTERPRETER` on a CPU.
        total: columns of all products; None: there is only one product.
        all_rows: rows of all ranks' parts; None: there is only one part.
        aligned: whether rows (or columns) of all operands begin at multiples of 16 elements and are contiguous; see
            `are_aligned`. Other operands are loaded element by element, and then large tiles would need too many
            registers.

    Raises:
        ValueError: no kernel is known for the architecture.
    """
    if architecture == INTERPRETER:
        return Configuration(_fitting(rows, 16), _fitting(n, 32), _fitting(k, 64), 1, 4, 1)
    require_known(architecture)
    if dtype.itemsize >= 4 or not aligned:
        # Float32 and float64 are multiplied without tensor cores or with small ones.
        tile_m, tile_n = _fitting(rows, 64), _fitting(n, 32 if dtype.itemsize == 8 else 64)
        tile_k = 32 if dtype.itemsize <= 2 else 16
        return Configuration(tile_m, tile_n, tile_k, _group(rows, tile_m), 4 if aligned else 8, 3)
    # 128 bytes of K in a step: a row of the shared memory that tensor cores read.
    tile_m, tile_k = _fitting(rows, 128), 128 // dtype.itemsize
    if architecture == 80:
        return Configuration(tile_m, _fitting(n, 128), tile_k, _group(rows, tile_m), 8, 3)
    wide = tile_m == 128 and dtype.itemsize > 1 and _wide_is_quicker(all_rows or rows, total or n, tile_m)
    tile_n = _fitting(n, 256 if wide else 128)
    # Products of 8-bit floats have two accumulators, and their scales need registers too.
    warps = 8 if tile_m * tile_n >= 128 * (256 if dtype.itemsize > 1 else 128) else 4
    return Configuration(tile_m, tile_n, tile_k, _group(rows, tile_m), warps, 4, descriptors=True)


def are_aligned(*operands: Tensor) -> bool:
    """True if matrices suit vector loads and tensor descriptors: the elements of a row, or of a column, are contiguous,
    and their number, the other stride and the address are multiples of 16. There may be any number of such rows.
    """
    return all(
        min(operand.stride()) == 1
        and max(operand.stride()) % 16 == 0
        and operand.shape[0 if operand.stride(1) != 1 else 1] % 16 == 0
        and operand.data_ptr() % 16 == 0
        for operand in operands
    )


def most_weights(dtype: torch.dtype, architecture: int) -> int:
    """Return the largest number of weights that one launch multiplies with."""
    # On architecture 100, threads run out of registers with the scales and biases of three weights in 8-bit floats.
    return 2 if dtype.itemsize == 1 and architecture == 100 else MOST_WEIGHTS


def programs(multiprocessors: int) -> int:
    """Return how many programs of a persistent matmul are launched.

    One multiprocessor is left free. Signals and waits of the copy stream may be kernels, and a matmul that occupies
    every register of every multiprocessor would keep out the kernels that it waits for.
    """
    return max(1, multiprocessors - 1)


def _wide_is_quicker(rows: int, columns: int, tile_m: int) -> bool:
    """Return whether tiles of 256 columns take less time than tiles of 128 for products of this size. Wide tiles read
    less per FLOP, but their last wave leaves more of the multiprocessors idle.

    All ranks' rows count, although only this rank's own are there at first. If these are less than a wave, the other
    programs wait while one part arrives, which is a small fraction of the time of one wide tile with a long K.
    """

    def time(tile_n: int, rate: float) -> float:
        tiles = -(-rows // tile_m) * -(-columns // tile_n)
        return -(-tiles // programs(_MULTIPROCESSORS)) * tile_n / rate

    return time(256, 1.0) <= time(128, _NARROW_RATE)


def _group(rows: int, tile_m: int) -> int:
    # A group never crosses the border of a part: its first tiles would have to wait for the rows of its last ones.
    return max(1, min(8, rows // tile_m))


def _fitting(size: int, most: int) -> int:
    """Return the smallest power of two, at least 16, that covers ``size``, but at most ``most``."""
    tile = 16
    while tile < size and tile < most:
        tile *= 2
    return tile
