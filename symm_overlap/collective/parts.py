"""What is done with the parts of a collective: consumers take what an all-gather brings, producers make what a
reduction sums.

They are objects, not callbacks, so that an exchange can see the matmul in them: its operands and its outputs. Each
knows how to work on one part, and how to work on everything at once; an exchange calls whatever suits it. Memory that
several calls share is made before the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ..runtime import Backend
from .layouts import GatherLayout


class Consumer(Protocol):
    """What is done with the shards of all ranks.

    Attributes:
        outputs: what is written.
        accumulates: whether every part is added to the same output, so that no two parts can be worked on at once.
    """

    outputs: Sequence[Tensor]
    accumulates: bool

    def part(self, rank: int, start: int, part: Tensor) -> None:
        """Consume rows ``start`` on of the flat shard of ``rank``. The own shard comes first."""

    def shards(self, shards: Sequence[Tensor]) -> None:
        """Consume every flat shard, in rank order, where it lies."""

    def whole(self, gathered: Tensor) -> None:
        """Consume the flat gathered tensor."""


class Products:
    """Every gathered row times each weight: ``product = gathered @ B``."""

    accumulates = False

    def __init__(
        self, backend: Backend, layout: GatherLayout, Bs: Sequence[Tensor], products: Sequence[Tensor]
    ) -> None:
        self.backend, self.layout, self.Bs, self.outputs = backend, layout, Bs, products

    def part(self, rank: int, start: int, part: Tensor) -> None:
        """See `Consumer.part`."""
        first, rows = rank * self.layout.rows + start, part.shape[0]
        for B, product in zip(self.Bs, self.outputs, strict=True):
            self.backend.multiply(part, B, product if rows == product.shape[0] else product[first : first + rows])

    def shards(self, shards: Sequence[Tensor]) -> None:
        """See `Consumer.shards`."""
        self.backend.multiply_shards(shards, self.Bs, self.outputs)

    def whole(self, gathered: Tensor) -> None:
        """See `Consumer.whole`."""
        for B, product in zip(self.Bs, self.outputs, strict=True):
            self.backend.multiply(gathered, B, product)


class SummedProducts:
    """The gathered columns are contracted: ``total = sum(shard of rank r @ rows of B for rank r)``.

    Half precision is added up in float32 and rounded once, by `finish`.
    """

    accumulates = True

    def __init__(
        self, backend: Backend, layout: GatherLayout, Bs: Sequence[Tensor], products: Sequence[Tensor]
    ) -> None:
        self.backend, self.layout, self.Bs, self.products = backend, layout, Bs, products
        self.outputs = [accumulator(product) for product in products]
        self._written: set[int] = set()  # rows, by their first one, that have been written and not only made

    def part(self, rank: int, start: int, part: Tensor) -> None:
        """See `Consumer.part`."""
        columns, add = self.layout.columns, start in self._written
        self._written.add(start)
        for B, total in zip(self.Bs, self.outputs, strict=True):
            weight, target = B[rank * columns : (rank + 1) * columns], total[start : start + part.shape[0]]
            if target.dtype == part.dtype:
                self.backend.multiply(part, weight, target, add)
            elif add:
                target.add_(part @ weight)
            else:
                target.copy_(part @ weight)

    def shards(self, shards: Sequence[Tensor]) -> None:
        """See `Consumer.shards`."""
        for rank, shard in enumerate(shards):
            self.part(rank, 0, shard)

    def whole(self, gathered: Tensor) -> None:
        """See `Consumer.whole`."""
        for B, total, product in zip(self.Bs, self.outputs, self.products, strict=True):
            self.backend.multiply(gathered, B, product)
            if total is not product:
                total.copy_(product)

    def finish(self) -> None:
        """After the exchange: round the sums."""
        for product, total in zip(self.products, self.outputs, strict=True):
            if total is not product:
                product.copy_(total)


class WeightGradients:
    """``total += gathered.t() @ grad`` for each gradient; totals start at 0."""

    accumulates = True

    def __init__(
        self, backend: Backend, layout: GatherLayout, grads: Sequence[Tensor], totals: Sequence[Tensor]
    ) -> None:
        self.backend, self.layout, self.grads, self.outputs = backend, layout, grads, totals

    def part(self, rank: int, start: int, part: Tensor) -> None:
        """See `Consumer.part`."""
        layout = self.layout
        first = start if layout.last else rank * layout.rows + start
        for grad, total in zip(self.grads, self.outputs, strict=True):
            target = total[rank * layout.columns : (rank + 1) * layout.columns] if layout.last else total
            self._add(part, grad[first : first + part.shape[0]], target)

    def shards(self, shards: Sequence[Tensor]) -> None:
        """See `Consumer.shards`."""
        for rank, shard in enumerate(shards):
            self.part(rank, 0, shard)

    def whole(self, gathered: Tensor) -> None:
        """See `Consumer.whole`."""
        for grad, total in zip(self.grads, self.outputs, strict=True):
            self._add(gathered, grad, total)

    def _add(self, rows: Tensor, grad: Tensor, total: Tensor) -> None:
        if total.dtype == rows.dtype:
            self.backend.multiply(rows.t(), grad, total, True)
        else:
            total.add_(rows.t() @ grad)


def accumulator(tensor: Tensor) -> Tensor:
    """Where to add up what ends in ``tensor``: the tensor itself, or a float32 one if it has half precision."""
    return tensor.new_empty(tensor.shape, dtype=torch.float32) if tensor.dtype.itemsize == 2 else tensor


class Producer(Protocol):
    """Makes what is summed over ranks, and then belongs to one rank each: matrices of one shape."""

    def part(self, owner: int, start: int, out: Tensor) -> None:
        """Write rows ``start`` on of what is for ``owner`` to ``out``."""

    def whole(self, out: Tensor) -> None:
        """Write what is for all ranks, in rank order, to ``out``: (world * rows, columns)."""


class ScatteredProducts:
    """``sum(A @ B for A, B) + addend``, cut into parts along a dimension.

    Where the rows of a part do not lie together in memory they are copied, here and now: a copy made by the step that
    first needs it would belong to that step's stream, and another stream may run the next step.
    """

    def __init__(
        self,
        backend: Backend,
        As: Sequence[Tensor],
        Bs: Sequence[Tensor],
        addend: Tensor | None,
        scatter_dim: int,
        world: int,
    ) -> None:
        like = As[0] if addend is None else addend
        self.backend, self.world = backend, world
        self.last = scatter_dim == like.dim() - 1
        self.addend = None if addend is None else parts_of(addend, scatter_dim, world)
        if self.last:
            self.As = [matrix(A) for A in As]
            self.Bs = [list(B.chunk(world, 1)) if B.shape[1] else [B] * world for B in Bs]
            self.whole_Bs = Bs
        else:
            self.As = [parts_of(A, scatter_dim, world) for A in As]
            self.Bs = [[B] * world for B in Bs]
            self.whole_Bs = Bs

    def part(self, owner: int, start: int, out: Tensor) -> None:
        """See `Producer.part`."""
        rows, add = slice(start, start + out.shape[0]), False
        for A, B in zip(self.As, self.Bs, strict=True):
            left = A if self.last else A[owner]
            self.backend.multiply(left[rows], B[owner], out, add)
            add = True
        if self.addend is not None:
            extra = self.addend[owner, rows]
            out.add_(extra) if add else self.backend.copy(out, extra)

    def whole(self, out: Tensor) -> None:
        """See `Producer.whole`."""
        # Along the last dimension a part is a block of columns of the product, which has to be made first.
        columns = self.world * out.shape[1]
        product = out.new_empty(out.shape[0] // self.world, columns) if self.last and self.As else out
        add = False
        for A, B in zip(self.As, self.whole_Bs, strict=True):
            self.backend.multiply(A if self.last else A.flatten(0, 1), B, product, add)
            add = True
        if product is not out:
            blocks = product.unflatten(1, (self.world, out.shape[1])).movedim(1, 0)
            out.unflatten(0, (self.world, product.shape[0])).copy_(blocks)
        if self.addend is not None:
            extra = self.addend.flatten(0, 1)
            out.add_(extra) if add else self.backend.copy(out, extra)


def parts_of(tensor: Tensor, dim: int, world: int) -> Tensor:
    """(world, rows, columns): the parts along a dimension, each as a matrix. A copy where that cannot be a view."""
    if dim == 0 and tensor.dim() == 2 and tensor.is_contiguous():
        return tensor.view(world, tensor.shape[0] // world, tensor.shape[1])
    split = tensor.unflatten(dim, (world, tensor.shape[dim] // world)).movedim(dim, 0)
    parts: Tensor = split.reshape(world, prod(split.shape[1:-1]), split.shape[-1])
    return parts


def matrix(tensor: Tensor) -> Tensor:
    """All rows of ``tensor`` as a matrix, however many there are of them when it is empty."""
    return tensor if tensor.dim() == 2 else tensor.reshape(prod(tensor.shape[:-1]), tensor.shape[-1])


class RowProducer(Protocol):
    """Makes a matrix that is summed over ranks for all of them; ranks share out its rows, which need not divide."""

    def rows(self, start: int, out: Tensor) -> None:
        """Write rows ``start`` on to ``out``."""

    def whole(self, out: Tensor) -> None:
        """Write everything to ``out``, which is contiguous and may have another shape."""


class RowProducts:
    """``A @ B + bias``."""

    def __init__(self, backend: Backend, A: Tensor, B: Tensor, bias: Tensor | None = None) -> None:
        self.backend, self.A, self.B, self.bias = backend, A, B, bias

    def rows(self, start: int, out: Tensor) -> None:
        """See `RowProducer.rows`."""
        self._multiply(self.A[start : start + out.shape[0]], out)

    def whole(self, out: Tensor) -> None:
        """See `RowProducer.whole`."""
        self._multiply(self.A, out.view(self.A.shape[0], self.B.shape[1]))

    def _multiply(self, rows: Tensor, out: Tensor) -> None:
        self.backend.multiply(rows, self.B, out)
        if self.bias is not None:
            out.add_(self.bias)


class Rows:
    """The rows of a tensor that is there already."""

    def __init__(self, backend: Backend, X: Tensor) -> None:
        self.backend, self.X = backend, X

    def rows(self, start: int, out: Tensor) -> None:
        """See `RowProducer.rows`."""
        self.backend.copy(out, self.X[start : start + out.shape[0]])

    def whole(self, out: Tensor) -> None:
        """See `RowProducer.whole`."""
        self.backend.copy(out.view(self.X.shape), self.X)
