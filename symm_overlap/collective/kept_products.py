"""A producer whose products, or their sum, the caller wants too, and not only their sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

from torch import Tensor

from ..runtime import Backend, Copy, Operand, Work, carry_out
from .parts import ScatteredProducts
from .places import Keep, Places


class KeptProducts(ScatteredProducts):
    """``sum(A @ B for A, B) + addend``, cut into parts along a dimension, some of which the caller wants whole.

    Every part is made where it is exchanged, and copied to its place in what is kept while the caches still hold it;
    the own part is made there at once, where it is what is summed.
    Products that are kept come first in the sum; each but the first is made in memory of its own before it is added.

    Args:
        shape: that of each product.
        keep: the products to keep, by their index.
        keep_sum: whether to keep the sum.

    Attributes:
        products: those that are kept, as matrices, in the order of ``keep``.
        total: the sum, as a matrix, if it is kept.
    """

    def __init__(
        self,
        backend: Backend,
        As: Sequence[Tensor],
        Bs: Sequence[Tensor],
        addend: Tensor | None,
        shape: Sequence[int],
        scatter_dim: int,
        world: int,
        keep: Sequence[int],
        keep_sum: bool,
    ) -> None:
        order = [*keep, *(index for index in range(len(As)) if index not in keep)]
        super().__init__(
            backend, [As[index] for index in order], [Bs[index] for index in order], addend, scatter_dim, world
        )
        rows, columns = prod(shape[:-1]), shape[-1]
        self.products = [backend.new_output(As[0], rows, columns) for _ in keep]
        self.total = backend.new_output(As[0], rows, columns) if keep_sum else None
        self.kept = self.products if self.total is None else [*self.products, self.total]
        if scatter_dim == 0 and not self.last:  # its rows lie in rank order
            alone = len(As) == 1 and addend is None
            self.kept_sum = self.products[0] if self.total is None and self.products and alone else self.total
        self.operands = (*self.operands, *self.kept)
        self._places = Places(backend, shape, scatter_dim, world)

    def part(self, owner: int, start: int, out: Tensor) -> None:
        """See `Producer.part`."""
        stop, columns = start + out.shape[0], out.shape[1]
        As, Bs = [self._rows(A, 0 if self.last else owner, start, stop) for A in self.As], self.Bs
        if self.last:
            Bs = [B[:, owner * columns : (owner + 1) * columns] for B in Bs]
        addend = None if self.addend is None else self._rows(self.addend, owner, start, stop)
        self._add_up(As, Bs, addend, out, partial(self._places.keep_part, owner, start))

    def whole(self, out: Tensor) -> None:
        """See `Producer.whole`."""
        if (work := self.work(out)) is not None:
            carry_out(self.backend, work)
        elif not self.last:
            self._add_up(self.As, self.Bs, self.addend, out, self._places.keep_whole)
        else:
            self._whole_columns(out)

    def part_work(self, rank: int, start: int, part: Operand) -> Sequence[Work] | None:
        """Parts are copied to places that are no matrices."""
        return None

    def work(self, whole: Operand) -> Sequence[Work] | None:
        """See `TellsWork.work`."""
        if self.addend is not None or self.last or not self._places.in_rank_order or len(self.products) > 1:
            return None
        first, *others = self._products(whole)
        copies = [Copy(product, whole) for product in self.products]
        sums = [] if self.total is None else [Copy(self.total, whole)]
        return [first, *copies, *others, *sums]

    def _whole_columns(self, out: Tensor) -> None:
        """Everything at once, along the last dimension: the products are made first, and then cut into blocks."""
        alone = len(self.As) == 1 and bool(self.products)
        rows, columns = out.shape[0] // self.world, self.world * out.shape[1]
        made = self.products[0] if alone else self.backend.new_output(out, rows, columns)
        self._multiply(self.As, self.Bs, made, self._keep_as_it_is)
        self._places.take_whole(made, out)
        if self.addend is not None:
            out.add_(self.addend)
        if self.total is not None:
            self._places.keep_whole(self.total, out)

    def _add_up(
        self, As: Sequence[Tensor], Bs: Sequence[Tensor], addend: Tensor | None, out: Tensor, keep: Keep
    ) -> None:
        """Make the sum, and keep what is wanted on the way."""
        self._multiply(As, Bs, out, keep)
        if addend is not None:
            out.add_(addend)
        if self.total is not None:
            keep(self.total, out)

    def _multiply(self, As: Sequence[Tensor], Bs: Sequence[Tensor], out: Tensor, keep: Keep) -> None:
        for number, (A, B) in enumerate(zip(As, Bs, strict=True)):
            if 0 < number < len(self.products):
                product = self.backend.new_output(out, *out.shape)
                self.backend.multiply(A, B, product)
                keep(self.products[number], product)
                out.add_(product)
                continue
            self.backend.multiply(A, B, out, number > 0)
            if number < len(self.products):
                keep(self.products[number], out)

    def _keep_as_it_is(self, kept: Tensor, made: Tensor) -> None:
        """Copy all rows, which lie in both as in the product."""
        if kept is not made:
            self.backend.copy(kept, made)

    def _rows(self, tensor: Tensor, owner: int, start: int, stop: int) -> Tensor:
        """Rows of what is for ``owner``, of a matrix in rank order."""
        first = owner * (tensor.shape[0] // self.world)
        return tensor[first + start : first + stop]
