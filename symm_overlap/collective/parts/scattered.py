"""The producer of a reduce-scatter: the parts of a sum of products, one for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import Add, Backend, Copy, Make, Multiply, Operand, Part, Slice, Work, tensor_of, view_of
from .described import DescribedParts
from .products import present
from .protocol import Producer


class Factors(NamedTuple):
    """What ``A @ B + bias`` is computed from. The bias may be missing."""

    A: Operand
    B: Operand
    bias: Operand | None

    def product(self, out: Operand, add: bool = False) -> Multiply:
        """Return the work that writes the product to ``out``, or adds it."""
        return Multiply(self.A, self.B, out, add, self.bias)


class ScatteredProducts(DescribedParts, Producer):
    """``sum(A @ B + bias for A, B, bias) + addend``, cut into parts along a dimension.

    If the rows of a part are not together in memory, the constructor copies them. If instead the first step that needs
    the copy made it, the copy would belong to that step's stream, and another stream may run the next step.

    Args:
        As, Bs, biases: the factors and the bias, or None, of each product.
        dtype: the dtype in which the products are added; by default their own.
    """

    def __init__(
        self,
        backend: Backend,
        As: Sequence[Tensor],
        Bs: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        addend: Tensor | None,
        scatter_dim: int,
        world: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        like = As[0] if addend is None else addend
        self.backend, self.world, self.dtype = backend, world, dtype or like.dtype
        self.last = scatter_dim == like.dim() - 1
        self.addend = None if addend is None else in_rank_order(addend, scatter_dim, world)
        self.As = [matrix(A) if self.last else in_rank_order(A, scatter_dim, world) for A in As]
        self.Bs, self.biases = Bs, biases
        self.factors = list(map(Factors, self.As, Bs, biases))
        self.operands = *self.As, *Bs, *present([*biases, self.addend])
        if not As and self.addend is not None and self.addend.is_contiguous():
            self.made = self.addend

    @property
    def is_one_matmul(self) -> bool:
        """Whether the parts are rows of one product, in rank order, and nothing else is computed or kept."""
        return len(self.factors) == 1 and self.addend is None and not self.last and not self.kept

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.work`."""
        if not self.factors:
            assert self.addend is not None
            return [Copy(whole, self.addend)]
        work = self._in_blocks(whole) if self.last else _products(whole, self.factors)
        return work if self.addend is None else [*work, Add(whole, self.addend)]

    def part_work(self, owner: int, start: int, part: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.part_work`."""
        addend = self._addend_of(owner, start, part)
        if not self.factors:
            assert addend is not None
            return [Copy(part, addend)]
        work = _products(part, self._factors_of(owner, start, part))
        return work if addend is None else [*work, Add(part, addend)]

    def _in_blocks(self, whole: Tensor | Part) -> list[Work]:
        """Cut the product into blocks of columns, along the last dimension. It has to be computed as a whole first."""
        rows, columns = tensor_of(whole).shape[0] // self.world, tensor_of(whole).shape[1]
        product = self.As[0].new_empty(rows, self.world * columns, dtype=self.dtype)
        blocks = product.unflatten(1, (self.world, columns)).movedim(1, 0)
        places = view_of(whole, lambda out: out.unflatten(0, (self.world, rows)))
        return [Make(product), *_products(product, self.factors), Copy(places, Part(product, blocks))]

    def _factors_of(self, owner: int, start: int, part: Tensor | Part) -> list[Factors]:
        """Return the factors for rows ``start`` on of the part for ``owner``."""
        rows, columns = tensor_of(part).shape
        first = owner * columns
        return [
            Factors(
                Slice(A, 0, start, rows),
                Slice(B, 1, first, columns),
                None if bias is None else Slice(bias, 0, first, columns),
            )
            if self.last
            else Factors(self._rows_of(A, owner, start, rows), B, bias)
            for A, B, bias in zip(self.As, self.Bs, self.biases, strict=True)
        ]

    def _addend_of(self, owner: int, start: int, part: Tensor | Part) -> Operand | None:
        """Return what is added to these rows."""
        return None if self.addend is None else self._rows_of(self.addend, owner, start, tensor_of(part).shape[0])

    def _rows_of(self, tensor: Tensor, rank: int, start: int, rows: int) -> Slice:
        """Return rows ``start`` on of the part for ``rank``, from a matrix in rank order."""
        return Slice(tensor, 0, rank * (tensor.shape[0] // self.world) + start, rows)


def _products(out: Operand, factors: Sequence[Factors]) -> list[Work]:
    """Return the work that writes the sum of the products to ``out``."""
    return [each.product(out, number > 0) for number, each in enumerate(factors)]


def in_rank_order(tensor: Tensor, dim: int, world: int) -> Tensor:
    """Return (rows, columns): each rank's rows along a dimension, in rank order. A copy if it cannot be a view."""
    if dim == 0 and tensor.dim() == 2:
        return tensor
    return parts_of(tensor, dim, world).flatten(0, 1)


def parts_of(tensor: Tensor, dim: int, world: int) -> Tensor:
    """Return (world, rows, columns): the parts along a dimension, each as a matrix. Copied if it cannot be a view."""
    if dim == 0 and tensor.dim() == 2 and tensor.is_contiguous():
        return tensor.view(world, tensor.shape[0] // world, tensor.shape[1])
    split = tensor.unflatten(dim, (world, tensor.shape[dim] // world)).movedim(dim, 0)
    parts: Tensor = split.reshape(world, prod(split.shape[1:-1]), split.shape[-1])
    return parts


def matrix(tensor: Tensor) -> Tensor:
    """Return all rows of ``tensor`` as a matrix, also if ``tensor`` is empty."""
    return tensor if tensor.dim() == 2 else tensor.reshape(prod(tensor.shape[:-1]), tensor.shape[-1])
