"""Where the parts of a product are located in it, for a caller that wants the whole product that it scatters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

from torch import Tensor

from ...runtime import Copy, Part, Work, tensor_of, view_of

Keep = Callable[[Tensor, Tensor | Part], Sequence[Work]]
"""``keep(kept, made)`` is the work that copies a computed tensor to its place in a kept tensor."""


class Places:
    """The places in a whole product of the parts that are exchanged. Each part is a matrix.

    Args:
        shape: the shape of the product.
        scatter_dim: the dimension along which the product is cut into parts. For the last dimension, parts are blocks
            of columns.
    """

    def __init__(self, shape: Sequence[int], scatter_dim: int, world: int) -> None:
        last = scatter_dim == len(shape) - 1
        # (before, ranks, rows, columns). Blocks of columns have one row each.
        before = prod(shape[:scatter_dim])
        behind = 1 if last else prod(shape[scatter_dim:-1]) // world
        self._shape = before, world, behind, shape[-1] // world if last else shape[-1]

    def keep_part(self, owner: int, start: int, whole: Tensor, made: Tensor | Part) -> Sequence[Work]:
        """Copy rows ``start`` on of the part for ``owner`` into the whole product."""
        places, at, copies = whole.view(self._shape), 0, []
        rows_made = tensor_of(made)
        for before, rows in _blocks(start, start + rows_made.shape[0], self._shape[2]):
            place = places[before, owner, rows]
            block = view_of(made, partial(_rows_as, at, place.shape))
            if place.data_ptr() != block.view.data_ptr():  # equal if the part was computed in its place
                copies.append(Copy(Part(whole, place), block))
            at += place.shape[0] * place.shape[1]
        return copies

    def keep_whole(self, whole: Tensor, made: Tensor | Part) -> Sequence[Work]:
        """Copy the parts for all ranks, in rank order, into the whole product."""
        return [Copy(self._ordered(whole), self._stacked(made))]

    def take_whole(self, whole: Tensor, out: Tensor | Part) -> Sequence[Work]:
        """Copy the whole product to the parts for all ranks, in rank order."""
        return [Copy(self._stacked(out), self._ordered(whole))]

    def _ordered(self, whole: Tensor) -> Part:
        return Part(whole, whole.view(self._shape).movedim(1, 0))

    def _stacked(self, out: Tensor | Part) -> Part:
        before, world, rows, columns = self._shape
        return view_of(out, lambda rows_of_all: rows_of_all.view(world, before, rows, columns))


def _rows_as(start: int, shape: Sequence[int], made: Tensor) -> Tensor:
    """Return rows ``start`` on as blocks of rows: (blocks, rows, columns)."""
    return made[start : start + shape[0] * shape[1]].view(shape)


def _blocks(start: int, stop: int, rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows ``start`` to ``stop`` of a flattened tensor (before, rows) as blocks of the tensor: at most three."""
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
