"""Multiply shards in separate memory as if they were one matrix, without ever storing that matrix.

The time of a matmul of few rows is the time to read the weight. Multiplying shard by shard would read the weight once
for each shard. Copying the shards together first would double the memory that the caller wants to save. So there are
two other ways. Either the whole matrix is built in slices of its columns: the shards' parts of a slice are copied
together and multiplied with the slice's rows of the weight, so the weight is read only once. Or the weight is processed
in blocks of its columns, and all shards are multiplied with a block while the caches hold it. A whole matrix of at most
64 KiB is one slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import _C

_SLICES = 12
"""The minimum number of slices, so that less than a tenth of the gathered matrix is stored at any time."""

_CHEAP = 64 << 10
"""A slice may have this many bytes even if there are then fewer slices, because each matmul has a set-up cost."""

_ALIGN = 16
"""Slices have a multiple of this many columns: a cache line or two."""

_BLOCK = 512
"""The minimum number of columns in a block of the weight."""

_BLOCK_BYTES = 256 << 10
"""The minimum bytes of a block: a second-level cache holds them, and each matmul has a set-up cost."""

_FEWEST_ROWS = 8
"""With fewer rows than this, a shard's matmul is limited by reading the block, even from a cache."""


def multiply_shards(
    shards: Sequence[Tensor], Bs: Sequence[Tensor], biases: Sequence[Tensor | None], products: Sequence[Tensor]
) -> None:
    """Compute ``product = torch.cat(shards) @ B + bias`` for each weight, bias and product.

    Args:
        shards: (rows, K), all of the same shape.
        Bs: the weights, (K, N_i).
        biases: (N_i,) or None, for each weight.
        products: (len(shards) * rows, N_i), contiguous. They are written.
    """
    rows, k = shards[0].shape
    column = len(shards) * rows * shards[0].element_size()  # bytes of one column of the whole matrix
    if k * column <= _CHEAP:  # one slice is the whole matrix
        whole = torch.cat(list(shards))
        for B, bias, product in zip(Bs, biases, products, strict=True):
            _C.multiply(whole, B, product, False, bias)
        return
    width = min(k // 2, max(k // _SLICES, _CHEAP // max(1, column))) // _ALIGN * _ALIGN
    # No slices if K is so small that they hardly matter, and none in half precision: a sum of slices that are each
    # rounded to half precision would be less exact than one matmul.
    apart = width == 0 or shards[0].dtype.itemsize == 2
    sliced = []
    for B, bias, product in zip(Bs, biases, products, strict=True):
        if apart or _quicker_in_blocks(shards[0], B):
            _multiply_in_blocks(shards, B, bias, product)
        else:
            sliced.append((B, bias, product))
    if not sliced:
        return
    slice_of_whole = shards[0].new_empty(len(shards) * rows, width)
    for start in range(0, k, width):
        columns = slice_of_whole[:, : k - start]
        torch.cat([shard[:, start : start + width] for shard in shards], out=columns)
        for B, bias, product in sliced:
            _C.multiply(columns, B[start : start + width], product, start > 0, bias if start == 0 else None)


def _quicker_in_blocks(shard: Tensor, B: Tensor) -> bool:
    """True if blocks are quicker than slices for this weight. A slice of the rows of ``W.t()`` has gaps in memory, and
    `multiply` does not use its quicker library for a matrix with gaps.
    """
    quicker = shard.dtype == torch.float32 and _C.onednn_is_quicker()
    return quicker and B.t().is_contiguous() and shard.shape[0] >= _FEWEST_ROWS


def _multiply_in_blocks(shards: Sequence[Tensor], B: Tensor, bias: Tensor | None, product: Tensor) -> None:
    """Multiply all shards with one block of the weight at a time. The whole weight is one block if its columns are not
    contiguous, because blocks of it would have gaps.
    """
    rows, n = shards[0].shape[0], B.shape[1]
    width = max(_BLOCK, _BLOCK_BYTES // max(1, B.shape[0] * B.element_size())) if B.t().is_contiguous() else max(1, n)
    for start in range(0, n, width):
        of_block = None if bias is None else bias[start : start + width]
        for rank, shard in enumerate(shards):
            target = product[rank * rows : (rank + 1) * rows, start : start + width]
            _C.multiply(shard, B[:, start : start + width], target, False, of_block)
