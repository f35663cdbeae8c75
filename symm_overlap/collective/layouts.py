"""The memory layout of a sharded tensor, of the gathered tensor, and of the products with it.

The reference is the fallback of torch's own op. If the gather dimension is not the last one, the reference moves it to
the front. Each rank's part of every output is then one block of rows, and the outputs are permuted views. If the gather
dimension is the last one, the matmul contracts it, and every rank's part is a block of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from ..runtime import backend_of

Size = int | torch.SymInt


def _contiguous(shape: Sequence[Size]) -> list[Size]:
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * torch.sym_max(size, 1)
    return strides


def _viewed(old: Sequence[Size], strides: Sequence[Size], new: Sequence[Size]) -> list[Size] | None:
    """Return the strides with which ``reshape`` views a tensor, or None if it has to copy.

    From right to left, old dimensions that follow one another in memory form runs, and the new dimensions must tile
    each run. This is written out because torch's fake tensors do not agree with real tensors on dimensions of size 1.
    """
    result: list[Size] = [0] * len(new)
    at, base = len(new) - 1, strides[-1]
    run: Size = 1
    tiled: Size = 1
    for dim in reversed(range(len(old))):
        run = run * old[dim]
        if dim > 0 and (old[dim - 1] == 1 or strides[dim - 1] == run * base):
            continue
        while at >= 0 and (tiled < run or new[at] == 1):
            result[at] = tiled * base
            tiled = tiled * new[at]
            at -= 1
        if tiled != run:
            return None
        base, run, tiled = strides[dim - 1], 1, 1
    return result


def gathered_strides(shape: Sequence[Size], gather_dim: int, world: int) -> tuple[Size, ...]:
    """Return the strides of the reference's gathered tensor, for a shard of this shape.

    The reference stacks the shards, moves the gather dimension behind the rank, and flattens the two, as a view if
    possible.
    """
    if gather_dim == len(shape) - 1:
        return tuple(_contiguous([*shape[:-1], world * shape[-1]]))
    order = [0, gather_dim + 1, *(dim + 1 for dim in range(len(shape)) if dim != gather_dim)]
    stacked = [world, *shape]
    steps = _contiguous(stacked)
    flat = [world * shape[gather_dim], *(stacked[dim] for dim in order[2:])]
    if gather_dim == 0:  # nothing moves; for a size that only the run knows, nothing else could be computed
        return tuple(_contiguous(flat))
    strides = None
    if not any(size == 0 for size in shape):
        strides = _viewed([stacked[dim] for dim in order], [steps[dim] for dim in order], flat)
    strides = strides or _contiguous(flat)
    strides.insert(gather_dim, strides.pop(0))
    return tuple(strides)


def reference_gathered(shard: Tensor, gather_dim: int, world: int) -> Tensor:
    """Return an empty tensor with the sizes and strides of the gathered ``shard``."""
    shape = list(shard.shape)
    shape[gather_dim] = world * shape[gather_dim]
    return shard.new_empty_strided(shape, gathered_strides(shard.shape, gather_dim, world))


def reference_product(
    shard: Tensor, columns: Size, gather_dim: int, world: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty tensor with the sizes and strides of the product of the gathered ``shard`` with a weight.

    Args:
        columns: number of columns of the weight.
        dtype: dtype of the result; by default that of ``shard``.
    """
    shape = [*shard.shape[:-1], columns]
    if gather_dim == shard.dim() - 1:
        return shard.new_empty(shape, dtype=dtype)
    rows = world * shape.pop(gather_dim)
    return shard.new_empty([rows, *shape], dtype=dtype).movedim(0, gather_dim)


_gathered_strides = lru_cache(maxsize=1024)(gathered_strides)


class PartsLayout:
    """Where the shards of all ranks are in a flat (2-D) gathered tensor: blocks of rows, or blocks of columns.

    Attributes:
        rows, columns: size of one rank's flat shard.
        world: number of ranks.
        last: whether the parts are blocks of columns.
        total_rows: number of rows of the gathered tensor.
    """

    def __init__(self, rows: int, columns: int, world: int, last: bool) -> None:
        self.rows, self.columns, self.world, self.last = rows, columns, world, last
        self.total_rows = rows if last else world * rows

    def new_gathered(self, shard: Tensor) -> Tensor:
        """Return memory for the gathered tensor, flat."""
        columns = self.world * self.columns if self.last else self.columns
        gathered = backend_of(shard.device.type).new_output(shard, self.total_rows, columns)
        if self.last and self.columns % 2 == 1 and shard.dtype.itemsize == 2:
            # A part is multiplied before its neighbour has arrived. CPU libraries multiply half-precision numbers in
            # pairs. If the number of columns is odd, they also read the first number of the neighbour and multiply it
            # by 0. If that memory happens to hold NaN, the product is NaN too. (Such calls are never repeated, because
            # their products are rounded after the exchange.)
            gathered.zero_()
        return gathered

    def part(self, flat: Tensor, rank: int) -> Tensor:
        """Return the part of a flat gathered tensor that comes from ``rank``: (rows, columns)."""
        if self.last:
            return flat[:, rank * self.columns : (rank + 1) * self.columns]
        return flat[rank * self.rows : (rank + 1) * self.rows]


class GatherLayout(PartsLayout):
    """The layout of one call, for a shard of a given shape."""

    def __init__(self, shape: Sequence[int], gather_dim: int, world: int) -> None:
        self.shape, self.gather_dim = tuple(shape), gather_dim
        super().__init__(prod(self.shape[:-1]), self.shape[-1], world, gather_dim == len(self.shape) - 1)
        lead = list(self.shape[:-1])
        if not self.last:
            lead.insert(0, world * lead.pop(gather_dim))
        self._lead = lead
        whole = self.columns * (world if self.last else 1)
        strides = _gathered_strides(self.shape, gather_dim, world)
        self._flat_gathered = len(lead) == 1 and strides == (max(whole, 1), 1)

    def flat_shard(self, shard: Tensor) -> Tensor:
        """Return the shard as (rows, columns), contiguous. It is copied only if its strides require it."""
        if len(self.shape) == 2 and (self.last or self.gather_dim == 0):
            return shard.contiguous()
        moved = shard if self.last or self.gather_dim == 0 else shard.movedim(self.gather_dim, 0)
        return moved.reshape(self.rows, self.columns).contiguous()

    def flat_product(self, product: Tensor) -> Tensor:
        """Return a tensor that has the shape of a product as (rows of all ranks, columns)."""
        return (product if self.last else product.movedim(self.gather_dim, 0)).reshape(
            self.total_rows, product.shape[-1]
        )

    def gathered(self, flat: Tensor) -> Tensor:
        """Return the flat gathered tensor with the sizes and strides that the op promises."""
        if self._flat_gathered:
            return flat
        tensor = self.product(flat)
        strides = _gathered_strides(self.shape, self.gather_dim, self.world)
        if tensor.stride() == strides:
            return tensor
        differ = [a != b for size, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True) if size > 1]
        if not any(differ):  # a dimension of size 1 may have any stride; the reference has particular ones
            return tensor.as_strided(tensor.shape, strides)
        # World size 1: the reference has not moved a dimension in memory.
        return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)

    def products(self, flat: list[Tensor]) -> list[Tensor]:
        """Return flat products with the sizes and strides that the op promises."""
        return flat if len(self._lead) == 1 else [self.product(each) for each in flat]

    def product(self, flat: Tensor) -> Tensor:
        """Return a flat product with the sizes and strides that the op promises."""
        if len(self._lead) == 1:
            return flat
        tensor = flat.view(*self._lead, flat.shape[1])
        return tensor if self.last else tensor.movedim(0, self.gather_dim)
