"""Where the dimension that a reduce-scatter scatters is in the matrices that are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from .._torch import known
from ..arrangement import Dimension, Size, atoms_of, of_shape, settled, size_of, take
from ..graph import value
from .order import Order
from .pattern import SkipError, arranged


@dataclass(frozen=True)
class Place:
    """The position of the scattered dimension in a matrix.

    Attributes:
        before, after: the number of rows before and after it; with ``last``, the number of rows and of columns.
        last: whether ranks get blocks of columns instead of rows.
        order: the order of the elements of a rank's part.
    """

    before: Size
    after: Size
    last: bool
    order: Order

    def same(self, other: Place) -> bool:
        """True if the two places are known to be equal."""
        sizes = (self.before, other.before), (self.after, other.after)
        return self.last == other.last and self.order.same(other.order) and all(known(a == b) for a, b in sizes)


def lies_at(place: Place, node: Node, path: Sequence[Node], world: int) -> bool:
    """True if the position is known to be the same in a term; see `place_in`."""
    try:
        return place_in(node, path, world).same(place)
    except SkipError:
        return False


def place_in(node: Node, path: Sequence[Node], world: int) -> Place:
    """Return the position in a term of the dimension that the collective scatters.

    Args:
        path: the nodes that rearrange the term on its way to the collective.
    """
    start = of_shape(value(node).shape)
    arrangement = arranged(start, path)
    first = list(settled(arrangement)[0])
    ranks = take(first, world)
    if ranks is None:
        raise SkipError("the collective's parts do not fit the dimensions of the product, as far as is known")
    *lead, columns = settled(start)
    rows = tuple(atom for dimension in lead for atom in dimension)
    ranks = settled((ranks,))[0]
    part = atoms_of((tuple(first), *arrangement[1:]))
    if (at := _index(rows, ranks)) is not None:
        before, after = rows[:at], rows[at + len(ranks) :]
        return Place(size_of(before), size_of(after), False, Order.between([*before, *after, *columns], part))
    if columns[: len(ranks)] == ranks:
        after = columns[len(ranks) :]
        return Place(size_of(rows), size_of(after), True, Order.between([*rows, *after], part))
    raise SkipError("a rank's part is not a block of rows or of columns of the product")


def _index(atoms: Dimension, part: Dimension) -> int | None:
    """Return the index at which ``part`` begins in ``atoms``, or None."""
    return next((at for at in range(len(atoms)) if atoms[at : at + len(part)] == part), None)
