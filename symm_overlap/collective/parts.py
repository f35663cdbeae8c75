"""What is done with the parts of a collective: consumers take what an all-gather brings, producers make what a
reduction sums. Those of an all-reduce are in `row_parts`.

They are objects, not callbacks, so that an exchange can see the matmul in them: its operands and its outputs. Each
knows how to work on one part, and how to work on everything at once; an exchange calls whatever suits it. Memory that
several calls share is made before the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..runtime import Backend, Copy, Multiply, Operand, Slice, Work, carry_out, tensor_of
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


@runtime_checkable
class TellsWork(Protocol):
    """A consumer or producer that can tell what it does, and not only do it: an exchange may then have it carried out
    without Python.

    Attributes:
        operands: the tensors of the caller's in its work, besides outputs of the call, in an order that equal calls
            share.
    """

    operands: Sequence[Tensor]

    def work(self, whole: Operand) -> Sequence[Work] | None:
        """What ``whole(whole)`` does, if it is no more than multiplications, copies and sums."""

    def part_work(self, rank: int, start: int, part: Operand) -> Sequence[Work] | None:
        """What ``part(rank, start, part)`` does, if it is no more than that."""


class Products:
    """Every gathered row times each weight: ``product = gathered @ B``."""

    accumulates = False

    def __init__(
        self, backend: Backend, layout: GatherLayout, Bs: Sequence[Tensor], products: Sequence[Tensor]
    ) -> None:
        self.backend, self.layout, self.Bs, self.outputs = backend, layout, Bs, products
        self.operands = (*Bs, *products)

    def part(self, rank: int, start: int, part: Tensor) -> None:
        """See `Consumer.part`."""
        carry_out(self.backend, self.part_work(rank, start, part))

    def shards(self, shards: Sequence[Tensor]) -> None:
        """See `Consumer.shards`."""
        self.backend.multiply_shards(shards, self.Bs, self.outputs)

    def whole(self, gathered: Tensor) -> None:
        """See `Consumer.whole`."""
        carry_out(self.backend, self.work(gathered))

    def work(self, whole: Operand) -> Sequence[Work]:
        """See `TellsWork.work`."""
        return [Multiply(whole, B, product) for B, product in zip(self.Bs, self.outputs, strict=True)]

    def part_work(self, rank: int, start: int, part: Operand) -> Sequence[Work]:
        """See `TellsWork.part_work`."""
        first, rows = rank * self.layout.rows + start, tensor_of(part).shape[0]
        return [
            Multiply(part, B, Slice(product, 0, first, rows)) for B, product in zip(self.Bs, self.outputs, strict=True)
        ]


class SummedProducts:
    """The gathered columns are contracted: ``total = sum(shard of rank r @ rows of B for rank r)``.

    Half precision is added up in float32 and rounded once, by `finish`.

    Args:
        rank: the own one, whose shard comes first.
    """

    accumulates = True

    def __init__(
        self, backend: Backend, layout: GatherLayout, Bs: Sequence[Tensor], products: Sequence[Tensor], rank: int
    ) -> None:
        self.backend, self.layout, self.Bs, self.products, self.rank = backend, layout, Bs, products, rank
        self.outputs = [accumulator(product) for product in products]
        self.operands = (*Bs, *self.outputs)

    def part(self, rank: int, start: int, part: Tensor) -> None:
        """See `Consumer.part`."""
        self._add(rank, start, part, rank != self.rank)

    def _add(self, rank: int, start: int, part: Tensor, add: bool) -> None:
        columns = self.layout.columns
        for B, total in zip(self.Bs, self.outputs, strict=True):
            weight, target = B[rank * columns : (rank + 1) * columns], total[start : start + part.shape[0]]
            if target.dtype == part.dtype:
                self.backend.multiply(part, weight, target, add)
                continue
            # Contiguous: behind the columns of this part are those of another, which may not have come yet. Torch 2.13
            # multiplies some of them with zero, in bfloat16 on CPUs with AMX, and a NaN does not become zero by that.
            product = part.contiguous() @ weight
            target.add_(product) if add else target.copy_(product)

    def shards(self, shards: Sequence[Tensor]) -> None:
        """See `Consumer.shards`."""
        for rank, shard in enumerate(shards):
            self._add(rank, 0, shard, rank > 0)

    def whole(self, gathered: Tensor) -> None:
        """See `Consumer.whole`."""
        for B, total, product in zip(self.Bs, self.outputs, self.products, strict=True):
            self.backend.multiply(gathered, B, product)
            if total is not product:
                total.copy_(product)

    def work(self, whole: Operand) -> Sequence[Work] | None:
        """See `TellsWork.work`."""
        if self._rounds:
            return None
        return [Multiply(whole, B, total) for B, total in zip(self.Bs, self.outputs, strict=True)]

    def part_work(self, rank: int, start: int, part: Operand) -> Sequence[Work] | None:
        """See `TellsWork.part_work`."""
        if self._rounds:
            return None
        columns, rows = self.layout.columns, tensor_of(part).shape[0]
        return [
            Multiply(part, Slice(B, 0, rank * columns, columns), Slice(total, 0, start, rows), rank != self.rank)
            for B, total in zip(self.Bs, self.outputs, strict=True)
        ]

    @property
    def _rounds(self) -> bool:
        return any(total is not product for total, product in zip(self.outputs, self.products, strict=True))

    def finish(self) -> None:
        """After the exchange: round the sums."""
        for product, total in zip(self.products, self.outputs, strict=True):
            if total is not product:
                product.copy_(total)


def accumulator(tensor: Tensor) -> Tensor:
    """Where to add up what ends in ``tensor``: the tensor itself, or a float32 one if it has half precision."""
    return tensor.new_empty(tensor.shape, dtype=torch.float32) if tensor.dtype.itemsize == 2 else tensor


class Producer(Protocol):
    """Makes what is summed over ranks, and then belongs to one rank each: matrices of one shape.

    Attributes:
        kept: outputs of the call besides the sum; whoever makes a part also writes its place in them.
        kept_sum: of these, the one that is what is summed, if its rows lie in rank order. A part may be made there.
    """

    kept: Sequence[Tensor] = ()
    kept_sum: Tensor | None = None

    def part(self, owner: int, start: int, out: Tensor) -> None:
        """Write rows ``start`` on of what is for ``owner`` to ``out``."""

    def whole(self, out: Tensor) -> None:
        """Write what is for all ranks, in rank order, to ``out``: (world * rows, columns)."""


class ScatteredProducts(Producer):
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
        self.backend, self.world, self.Bs = backend, world, Bs
        self.last = scatter_dim == like.dim() - 1
        self.addend = None if addend is None else in_rank_order(addend, scatter_dim, world)
        self.As = [matrix(A) if self.last else in_rank_order(A, scatter_dim, world) for A in As]
        self.operands = (*self.As, *Bs) if addend is None else (*self.As, *Bs, self.addend)

    @property
    def is_one_matmul(self) -> bool:
        """Whether the parts are rows of one product, in rank order, and nothing else is made or kept."""
        return len(self.As) == 1 and self.addend is None and not self.last and not self.kept

    def part(self, owner: int, start: int, out: Tensor) -> None:
        """See `Producer.part`."""
        if (work := self.part_work(owner, start, out)) is not None:
            carry_out(self.backend, work)
            return
        assert self.addend is not None
        carry_out(self.backend, self._part_products(owner, start, out))
        out.add_(tensor_of(self._rows_of(self.addend, owner, start, out.shape[0])))

    def whole(self, out: Tensor) -> None:
        """See `Producer.whole`."""
        if (work := self.work(out)) is not None:
            carry_out(self.backend, work)
            return
        # Along the last dimension a part is a block of columns of the product, which has to be made first.
        columns = self.world * out.shape[1]
        product = out.new_empty(out.shape[0] // self.world, columns) if self.last and self.As else out
        carry_out(self.backend, self._products(product))
        if product is not out:
            blocks = product.unflatten(1, (self.world, out.shape[1])).movedim(1, 0)
            out.unflatten(0, (self.world, product.shape[0])).copy_(blocks)
        if self.addend is not None:
            out.add_(self.addend) if self.As else self.backend.copy(out, self.addend)

    def work(self, whole: Operand) -> Sequence[Work] | None:
        """See `TellsWork.work`."""
        if self.addend is not None:
            return None if self.As else [Copy(whole, self.addend)]
        return None if self.last else self._products(whole)

    def part_work(self, rank: int, start: int, part: Operand) -> Sequence[Work] | None:
        """See `TellsWork.part_work`."""
        if self.addend is None:
            return self._part_products(rank, start, part)
        rows = tensor_of(part).shape[0]
        return None if self.As else [Copy(part, self._rows_of(self.addend, rank, start, rows))]

    def _part_products(self, rank: int, start: int, part: Operand) -> list[Work]:
        rows, columns = tensor_of(part).shape
        if self.last:
            As = [Slice(A, 0, start, rows) for A in self.As]
            return self._products(part, As, [Slice(B, 1, rank * columns, columns) for B in self.Bs])
        return self._products(part, [self._rows_of(A, rank, start, rows) for A in self.As])

    def _rows_of(self, tensor: Tensor, rank: int, start: int, rows: int) -> Slice:
        """Rows ``start`` on of what is for ``rank``, of a matrix in rank order."""
        return Slice(tensor, 0, rank * (tensor.shape[0] // self.world) + start, rows)

    def _products(
        self, out: Operand, As: Sequence[Operand] | None = None, Bs: Sequence[Operand] | None = None
    ) -> list[Work]:
        pairs = zip(As or self.As, Bs or self.Bs, strict=True)
        return [Multiply(A, B, out, number > 0) for number, (A, B) in enumerate(pairs)]


def in_rank_order(tensor: Tensor, dim: int, world: int) -> Tensor:
    """(rows, columns): the rows of every rank's part along a dimension, by rank. A copy where that cannot be a view."""
    if dim == 0 and tensor.dim() == 2:
        return tensor
    return parts_of(tensor, dim, world).flatten(0, 1)


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
