"""A producer whose products, or their sum, the caller wants too, and not only their sum over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

from torch import Tensor

from ..runtime import Backend, Copy, Work, carry_out
from .parts import ScatteredProducts

Keep = Callable[[Tensor, Tensor], None]
"""``keep(kept, made)`` copies what has been made to its place in a kept tensor."""


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
        # How parts lie in what is kept: (before, ranks, rows, columns), where blocks of columns have one row each.
        before = rows if self.last else prod(shape[:scatter_dim])
        behind = 1 if self.last else prod(shape[scatter_dim:-1]) // world
        self._places = before, world, behind, columns // world if self.last else columns

    def part(self, owner: int, start: int, out: Tensor) -> None:
        """See `Producer.part`."""
        stop, columns = start + out.shape[0], out.shape[1]
        As, Bs = [self._rows(A, 0 if self.last else owner, start, stop) for A in self.As], self.Bs
        if self.last:
            Bs = [B[:, owner * columns : (owner + 1) * columns] for B in Bs]
        addend = None if self.addend is None else self._rows(self.addend, owner, start, stop)
        self._add_up(As, Bs, addend, out, partial(self._keep_part, owner, start))

    def whole(self, out: Tensor) -> None:
        """See `Producer.whole`."""
        if (work := self.work(out)) is not None:
            carry_out(self.backend, work)
        elif not self.last:
            self._add_up(self.As, self.Bs, self.addend, out, self._keep_whole)
        else:
            self._whole_columns(out)

    def work(self, whole: Tensor) -> Sequence[Work] | None:
        """See `TellsWork.work`."""
        if self.addend is not None or self.last or self._places[0] != 1 or len(self.products) > 1:
            return None
        first, *others = self._products(whole)
        copies = [Copy(product, whole) for product in self.products]
        sums = [] if self.total is None else [Copy(self.total, whole)]
        return [first, *copies, *others, *sums]

    def _whole_columns(self, out: Tensor) -> None:
        """Everything at once, along the last dimension: the products are made first, and then cut into blocks."""
        rows, world, _, columns = self._places
        alone = len(self.As) == 1 and bool(self.products)
        made = self.products[0] if alone else self.backend.new_output(out, rows, world * columns)
        self._multiply(self.As, self.Bs, made, self._keep_as_it_is)
        out.view(world, rows, columns).copy_(made.view(rows, world, columns).movedim(1, 0))
        if self.addend is not None:
            out.add_(self.addend)
        if self.total is not None:
            self._keep_whole(self.total, out)

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

    def _keep_part(self, owner: int, start: int, kept: Tensor, made: Tensor) -> None:
        """Copy rows ``start`` on of what is for ``owner``."""
        places, at = kept.view(self._places), 0
        for before, rows in _blocks(start, start + made.shape[0], self._places[2]):
            place = places[before, owner, rows]
            count = place.shape[0] * place.shape[1]
            if place.data_ptr() != made.data_ptr():  # it may have been made there
                self.backend.copy(place, made[at : at + count].view(place.shape))
            at += count

    def _keep_whole(self, kept: Tensor, made: Tensor) -> None:
        """Copy what is for all ranks, in rank order."""
        before, world, rows, columns = self._places
        self.backend.copy(kept.view(self._places).movedim(1, 0), made.view(world, before, rows, columns))

    def _keep_as_it_is(self, kept: Tensor, made: Tensor) -> None:
        """Copy all rows, which lie in both as in the product."""
        if kept is not made:
            self.backend.copy(kept, made)

    def _rows(self, tensor: Tensor, owner: int, start: int, stop: int) -> Tensor:
        """Rows of what is for ``owner``, of a matrix in rank order."""
        first = owner * (tensor.shape[0] // self.world)
        return tensor[first + start : first + stop]


def _blocks(start: int, stop: int, rows: int) -> Iterator[tuple[slice, slice]]:
    """Rows ``start`` to ``stop`` of a tensor (before, rows), flattened, as blocks of it: at most three."""
    while start < stop:
        before, first = divmod(start, rows)
        if first or stop - start < rows:
            last = min(rows, first + stop - start)
            yield slice(before, before + 1), slice(first, last)
            start += last - first
        else:
            whole = (stop - start) // rows
            yield slice(before, before + whole), slice(0, rows)
            start += whole * rows
