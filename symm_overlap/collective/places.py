"""Where the parts of a product lie in it, for a caller who wants the whole of what he scatters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from torch import Tensor

from ..runtime import Backend

Keep = Callable[[Tensor, Tensor], None]
"""``keep(kept, made)`` copies what has been made to its place in a kept tensor."""


class Places:
    """The places of the parts that are exchanged, each a matrix, in a whole product.

    Args:
        shape: that of the product.
        scatter_dim: along which it is cut into parts; of the last dimension, these are blocks of columns.

    Attributes:
        in_rank_order: whether the rows of the product lie in the order in which parts are exchanged.
    """

    def __init__(self, backend: Backend, shape: Sequence[int], scatter_dim: int, world: int) -> None:
        self.backend, last = backend, scatter_dim == len(shape) - 1
        # (before, ranks, rows, columns), where blocks of columns have one row each.
        before = prod(shape[:scatter_dim])
        behind = 1 if last else prod(shape[scatter_dim:-1]) // world
        self._shape = before, world, behind, shape[-1] // world if last else shape[-1]
        self.in_rank_order = before == 1

    def keep_part(self, owner: int, start: int, whole: Tensor, made: Tensor) -> None:
        """Copy rows ``start`` on of what is for ``owner`` into the whole product."""
        places, at = whole.view(self._shape), 0
        for before, rows in _blocks(start, start + made.shape[0], self._shape[2]):
            place = places[before, owner, rows]
            count = place.shape[0] * place.shape[1]
            if place.data_ptr() != made.data_ptr():  # it may have been made there
                self.backend.copy(place, made[at : at + count].view(place.shape))
            at += count

    def keep_whole(self, whole: Tensor, made: Tensor) -> None:
        """Copy what is for all ranks, in rank order, into the whole product."""
        before, world, rows, columns = self._shape
        self.backend.copy(whole.view(self._shape).movedim(1, 0), made.view(world, before, rows, columns))

    def take_whole(self, whole: Tensor, out: Tensor) -> None:
        """Copy the whole product to what is for all ranks, in rank order."""
        before, world, rows, columns = self._shape
        self.backend.copy(out.view(world, before, rows, columns), whole.view(self._shape).movedim(1, 0))


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
