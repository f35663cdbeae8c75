"""The consumers that multiply what an all-gather brings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...runtime import Backend, Multiply, Part, Slice, Work, tensor_of
from ..layouts import GatherLayout
from .described import DescribedConsumer


class Products(DescribedConsumer):
    """Multiplies every gathered row with each weight: ``product = gathered @ B + bias``."""

    accumulates = False

    def __init__(
        self,
        backend: Backend,
        layout: GatherLayout,
        Bs: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        products: Sequence[Tensor],
    ) -> None:
        self.backend, self.layout, self.Bs, self.biases, self.outputs = backend, layout, Bs, biases, products
        self.operands = (*Bs, *present(biases), *products)

    def shards(self, shards: Sequence[Tensor]) -> None:
        """See `Consumer.shards`."""
        self.backend.multiply_shards(shards, self.Bs, self.biases, self.outputs)

    def shards_work(self, shards: Sequence[Tensor | Part]) -> Sequence[Work] | None:
        """Return None: the back end decides how to multiply the shards, by the memory layout of the weights."""
        return None

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.work`."""
        return [Multiply(whole, B, product, bias=bias) for B, bias, product in self._each]

    def part_work(self, rank: int, start: int, part: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.part_work`."""
        first, rows = rank * self.layout.rows + start, tensor_of(part).shape[0]
        return [Multiply(part, B, Slice(product, 0, first, rows), bias=bias) for B, bias, product in self._each]

    @property
    def _each(self) -> Iterable[tuple[Tensor, Tensor | None, Tensor]]:
        return zip(self.Bs, self.biases, self.outputs, strict=True)


class SummedProducts(DescribedConsumer):
    """Contracts the gathered columns: ``total = sum(shard of rank r @ rows of B for rank r) + bias``.

    Half precision is added up in float32 and rounded once, by `finish`. The first product includes the bias.

    Args:
        rank: this rank, whose shard comes first.
    """

    accumulates = True

    def __init__(
        self,
        backend: Backend,
        layout: GatherLayout,
        Bs: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        products: Sequence[Tensor],
        rank: int,
    ) -> None:
        self.backend, self.layout, self.Bs, self.biases, self.products = backend, layout, Bs, biases, products
        self.rank, self.outputs = rank, [accumulator(product) for product in products]
        self.operands = (*Bs, *present(biases), *self.outputs)

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.work`."""
        each = zip(self.Bs, self.biases, self.outputs, strict=True)
        return [Multiply(whole, B, total, bias=bias) for B, bias, total in each]

    def part_work(self, rank: int, start: int, part: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.part_work`."""
        return self._part_work(rank, start, part, rank != self.rank)

    def shards_work(self, shards: Sequence[Tensor | Part]) -> Sequence[Work]:
        """See `DescribedConsumer.shards_work`."""
        return [work for rank, shard in enumerate(shards) for work in self._part_work(rank, 0, shard, rank > 0)]

    def _part_work(self, rank: int, start: int, part: Tensor | Part, add: bool) -> list[Work]:
        columns, rows = self.layout.columns, tensor_of(part).shape[0]
        return [
            Multiply(
                part, Slice(B, 0, rank * columns, columns), Slice(total, 0, start, rows), add, None if add else bias
            )
            for B, bias, total in zip(self.Bs, self.biases, self.outputs, strict=True)
        ]

    def finish(self) -> None:
        """Round the sums, after the exchange."""
        for product, total in zip(self.products, self.outputs, strict=True):
            if total is not product:
                product.copy_(total)


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the tensors that are given."""
    return [each for each in tensors if each is not None]


def accumulator(tensor: Tensor) -> Tensor:
    """Return where to add up the sum that ends in ``tensor``: itself, or a float32 tensor if it has half precision."""
    return tensor.new_empty(tensor.shape, dtype=torch.float32) if tensor.dtype.itemsize == 2 else tensor
