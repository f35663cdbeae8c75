"""How a sharded tensor, its gathered whole and the products with it lie in memory.

The reference is the fallback of torch's own op. For a gather dimension other than the last it moves that dimension to the front, so
that each rank's part of every output is one block of rows; its outputs are permuted views. For the last dimension, which the matmul
contracts, every rank's part is a block of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

Size = int | torch.SymInt


def reference_gathered(shard: Tensor, gather_dim: int, world: int) -> Tensor:
    """An empty tensor with the sizes and strides of the gathered ``shard``."""
    shape = list(shard.shape)
    if gather_dim == shard.dim() - 1:
        return shard.new_empty([*shape[:-1], world * shape[-1]])
    stacked = shard.new_empty([world, *shape])
    return stacked.movedim(gather_dim + 1, 1).flatten(0, 1).movedim(0, gather_dim)


def reference_product(shard: Tensor, columns: Size, gather_dim: int, world: int) -> Tensor:
    """An empty tensor with the sizes and strides of the gathered ``shard`` times a weight with so many columns."""
    shape = [*shard.shape[:-1], columns]
    if gather_dim == shard.dim() - 1:
        return shard.new_empty(shape)
    rows = world * shape.pop(gather_dim)
    return shard.new_empty([rows, *shape]).movedim(0, gather_dim)


@lru_cache(maxsize=1024)
def _gathered_strides(shape: tuple[int, ...], gather_dim: int, world: int) -> tuple[int, ...]:
    return reference_gathered(torch.empty(shape, device="meta"), gather_dim, world).stride()


class GatherLayout:
    """The layout of one call, for a shard of a given shape.

    Attributes:
        rows, columns: of the flat (2-D) shard.
        last: whether the gather dimension is the last one.
    """

    def __init__(self, shape: Sequence[int], gather_dim: int, world: int) -> None:
        self.shape, self.gather_dim, self.world = tuple(shape), gather_dim, world
        self.last = gather_dim == len(self.shape) - 1
        self.rows, self.columns = prod(self.shape[:-1]), self.shape[-1]
        lead = list(self.shape[:-1])
        if not self.last:
            lead.insert(0, world * lead.pop(gather_dim))
        self._lead = lead

    def flat_shard(self, shard: Tensor) -> Tensor:
        """(rows, columns), contiguous; a copy only when the strides need one."""
        return (shard if self.last else shard.movedim(self.gather_dim, 0)).reshape(self.rows, self.columns).contiguous()

    def flat_product(self, product: Tensor) -> Tensor:
        """(rows of all ranks, columns) of a tensor that is shaped like a product."""
        return (product if self.last else product.movedim(self.gather_dim, 0)).reshape(self.total_rows, product.shape[-1])

    @property
    def total_rows(self) -> int:
        """Rows of a product."""
        return self.rows if self.last else self.world * self.rows

    def new_gathered(self, shard: Tensor) -> Tensor:
        """Room for the gathered tensor, flat."""
        if self.last:
            return shard.new_empty(self.rows, self.world * self.columns)
        return shard.new_empty(self.world * self.rows, self.columns)

    def part(self, flat: Tensor, rank: int) -> Tensor:
        """The part of a flat gathered tensor that comes from ``rank``: (rows, columns)."""
        if self.last:
            return flat[:, rank * self.columns : (rank + 1) * self.columns]
        return flat[rank * self.rows : (rank + 1) * self.rows]

    def gathered(self, flat: Tensor) -> Tensor:
        """The flat gathered tensor with the sizes and strides that the op promises."""
        tensor = self.product(flat)
        strides = _gathered_strides(self.shape, self.gather_dim, self.world)
        if tensor.stride() == strides:
            return tensor
        differ = [a != b for size, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True) if size > 1]
        if not any(differ):  # a dimension of size 1 may have any stride; the reference has particular ones
            return tensor.as_strided(tensor.shape, strides)
        # World size 1: the reference moved no dimension in memory.
        return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)

    def product(self, flat: Tensor) -> Tensor:
        """A flat product with the sizes and strides that the op promises."""
        tensor = flat.view(*self._lead, flat.shape[1])
        return tensor if self.last else tensor.movedim(0, self.gather_dim)
