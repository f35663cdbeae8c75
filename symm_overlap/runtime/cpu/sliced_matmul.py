"""Multiply shards that lie in several places as if they were one matrix, without holding that matrix.

A matmul of few rows takes as long as reading the weight. To multiply shard by shard would read it once for each; to
copy the shards together first would double the memory that the caller wants to save. So the whole is made in slices of
its columns: each is copied together and multiplied with its rows of the weight, which are read only once. Or the weight
is taken in blocks of its columns, and all shards are multiplied with a block while the caches hold it. A whole of at
most 64 KiB is one slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import _C

_SLICES = 12
"""At least so many: at any time less than a tenth of the gathered matrix exists."""

_CHEAP = 64 << 10
"""A slice may have so many bytes even if there are fewer slices then: each matmul has a set-up to pay for."""

_ALIGN = 16
"""Columns, a cache line or two."""

_BLOCK = 512
"""Columns of a block of the weight, at least."""

_BLOCK_BYTES = 256 << 10
"""Bytes of a block, at least: a second-level cache holds them, and each matmul has a set-up to pay for."""

_FEWEST_ROWS = 8
"""With fewer rows a shard's matmul is bound by reading the block, even when the block is in a cache."""


def multiply_shards(shards: Sequence[Tensor], Bs: Sequence[Tensor], products: Sequence[Tensor]) -> None:
    """For each weight and product, ``product = cat(shards) @ B``.

    Args:
        shards: (rows, K), of one shape.
        Bs: weights (K, N_i).
        products: (len(shards) * rows, N_i), contiguous.
    """
    rows, k = shards[0].shape
    column = len(shards) * rows * shards[0].element_size()  # bytes of one column of the whole
    if k * column <= _CHEAP:  # the one slice is everything
        whole = torch.cat(list(shards))
        for B, product in zip(Bs, products, strict=True):
            _C.multiply(whole, B, product, False)
        return
    width = min(k // 2, max(k // _SLICES, _CHEAP // max(1, column))) // _ALIGN * _ALIGN
    # Shard by shard where K is so small that it hardly matters, and in half precision: a sum of slices that were each
    # rounded to it would be less exact than one matmul.
    apart = width == 0 or shards[0].dtype.itemsize == 2
    sliced = []
    for B, product in zip(Bs, products, strict=True):
        if apart or _quicker_in_blocks(shards[0], B):
            _multiply_in_blocks(shards, B, product)
        else:
            sliced.append((B, product))
    if not sliced:
        return
    slice_of_whole = shards[0].new_empty(len(shards) * rows, width)
    for start in range(0, k, width):
        columns = slice_of_whole[:, : k - start]
        torch.cat([shard[:, start : start + width] for shard in shards], out=columns)
        for B, product in sliced:
            _C.multiply(columns, B[start : start + width], product, start > 0)


def _quicker_in_blocks(shard: Tensor, B: Tensor) -> bool:
    """Whether blocks suit this weight better than slices: a slice of the rows of ``W.t()`` has gaps in memory, and
    `multiply` does not use its quicker library for such a matrix.
    """
    quicker = shard.dtype == torch.float32 and _C.onednn_is_quicker()
    return quicker and B.t().is_contiguous() and shard.shape[0] >= _FEWEST_ROWS


def _multiply_in_blocks(shards: Sequence[Tensor], B: Tensor, product: Tensor) -> None:
    """The weight whole if its columns do not lie together: blocks of it would have gaps."""
    rows, n = shards[0].shape[0], B.shape[1]
    width = max(_BLOCK, _BLOCK_BYTES // max(1, B.shape[0] * B.element_size())) if B.t().is_contiguous() else max(1, n)
    for start in range(0, n, width):
        for rank, shard in enumerate(shards):
            target = product[rank * rows : (rank + 1) * rows, start : start + width]
            _C.multiply(shard, B[:, start : start + width], target, False)
