"""A producer for callers that want this rank's products, or their sum, in addition to the sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

from torch import Tensor

from ...runtime import Add, Backend, Copy, Make, Operand, Part, Work, tensor_of
from .places import Keep, Places
from .scattered import Factors, ScatteredProducts


class KeptProducts(ScatteredProducts):
    """``sum(A @ B + bias for A, B, bias) + addend``, cut into parts along a dimension. Some products, or the sum, are
    kept for the caller.

    Every part is computed where it is exchanged, and copied to its place in the kept tensor while it is still in the
    caches. If the kept tensor is what is summed over ranks, the local part is computed directly in its place. Kept
    products come first in the sum. Each of them except the first is computed in memory of its own before it is added.

    Args:
        shape: the shape of each product.
        keep: the indices of the products to keep.
        keep_sum: whether to keep the sum.

    Attributes:
        products: the kept products, as matrices, in the order of ``keep``.
        total: the sum, as a matrix, if it is kept.
    """

    def __init__(
        self,
        backend: Backend,
        As: Sequence[Tensor],
        Bs: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        addend: Tensor | None,
        shape: Sequence[int],
        scatter_dim: int,
        world: int,
        keep: Sequence[int],
        keep_sum: bool,
    ) -> None:
        order = [*keep, *(index for index in range(len(As)) if index not in keep)]
        As, Bs, biases = ([each[index] for index in order] for each in (As, Bs, biases))  # type: ignore[assignment]
        super().__init__(backend, As, Bs, biases, addend, scatter_dim, world)
        rows, columns = prod(shape[:-1]), shape[-1]
        self.products = [backend.new_output(As[0], rows, columns) for _ in keep]
        self.total = backend.new_output(As[0], rows, columns) if keep_sum else None
        self.kept = self.products if self.total is None else [*self.products, self.total]
        if scatter_dim == 0 and not self.last:  # the rows are in rank order
            alone = len(As) == 1 and addend is None
            self.kept_sum = self.products[0] if self.total is None and self.products and alone else self.total
        self.operands = (*self.operands, *self.kept)
        self._places = Places(shape, scatter_dim, world)

    def part_work(self, owner: int, start: int, part: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.part_work`."""
        keep = partial(self._places.keep_part, owner, start)
        return self._add_up(part, self._factors_of(owner, start, part), self._addend_of(owner, start, part), keep)

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.work`."""
        if self.last:
            return self._whole_columns(whole)
        return self._add_up(whole, self.factors, self.addend, self._places.keep_whole)

    def _whole_columns(self, whole: Tensor | Part) -> list[Work]:
        """Do everything at once along the last dimension: compute the products first, then cut them into blocks."""
        alone, (rows, columns) = len(self.factors) == 1 and bool(self.products), tensor_of(whole).shape
        shape = rows // self.world, self.world * columns
        made = self.products[0] if alone else self.backend.new_output(self.As[0], *shape)
        work: list[Work] = [] if alone else [Make(made)]
        work += self._multiply(made, self.factors, _keep_as_it_is)
        work += self._places.take_whole(made, whole)
        return work + self._finish(whole, self.addend, self._places.keep_whole)

    def _add_up(self, out: Tensor | Part, factors: Sequence[Factors], addend: Operand | None, keep: Keep) -> list[Work]:
        """Compute the sum, and keep the wanted tensors on the way."""
        return self._multiply(out, factors, keep) + self._finish(out, addend, keep)

    def _finish(self, out: Tensor | Part, addend: Operand | None, keep: Keep) -> list[Work]:
        work: list[Work] = [] if addend is None else [Add(out, addend)]
        return work if self.total is None else [*work, *keep(self.total, out)]

    def _multiply(self, out: Tensor | Part, factors: Sequence[Factors], keep: Keep) -> list[Work]:
        first, *others = factors
        work: list[Work] = [first.product(out)]
        if self.products:
            work += keep(self.products[0], out)
        kept, plain = self.products[1:], others[max(0, len(self.products) - 1) :]
        if kept:
            product = self.backend.new_output(tensor_of(out), *tensor_of(out).shape)
            work.append(Make(product))
        for each, place in zip(others, kept, strict=False):
            work += [each.product(product), *keep(place, product), Add(out, product)]
        return work + [each.product(out, add=True) for each in plain]


def _keep_as_it_is(kept: Tensor, made: Tensor | Part) -> list[Work]:
    """Copy all rows, which have the order of the product's rows in both tensors."""
    return [] if kept is made else [Copy(kept, made)]
