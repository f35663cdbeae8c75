"""Where the elements of a tensor are located in another tensor that was made from it by views, permutations, and
splitting and concatenating.

A tensor's dimensions are products of *atoms*: a dimension of size 32 may consist of the atoms (2, 16), where the first
atom is the slower index. All atoms come from the tensor at which the analysis starts. A view only groups them
differently. A permutation reorders dimensions. ``cat(split(x, n chunks, dim=p), dim=d)`` removes the atom of size n
from the front of dimension p and puts it in front of dimension d. If a view cuts an atom, the atom gets two parts.

So order, coverage and trimming need no special cases: anything that cannot be written with atoms has no arrangement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from ._torch import known, plain_size

Size = int  # or a SymInt, which behaves like one


class Atom:
    """A factor of a dimension's size.

    Attributes:
        size: the factor.
        parts: the two atoms that this atom has been cut into, the slower one first; None while it is whole.
    """

    __slots__ = ("parts", "size")

    def __init__(self, size: Size) -> None:
        self.size: Size = plain_size(size)
        self.parts: tuple[Atom, Atom] | None = None

    def __repr__(self) -> str:
        return f"Atom({self.size})" if self.parts is None else f"{self.parts}"

    def cut(self, outer: Size) -> bool:
        """Cut this atom into (outer, rest). Return False if ``outer`` is not known to divide its size."""
        rest = self.size // outer
        if not known(rest * outer == self.size):
            return False
        self.parts = Atom(outer), Atom(rest)
        return True


Dimension = tuple[Atom, ...]
Arrangement = tuple[Dimension, ...]
"""The dimensions of a tensor, each as its atoms. A dimension of size 1 has no atoms."""


def of_shape(shape: Sequence[Size]) -> Arrangement:
    """Return the arrangement at which an analysis starts: one atom for each dimension."""
    return tuple(() if known(size == 1) else (Atom(size),) for size in shape)


def whole(atoms: Iterable[Atom]) -> Dimension:
    """Return the atoms, with every atom that has been cut replaced by its parts."""
    found: list[Atom] = []
    for atom in atoms:
        if atom.parts is None:
            found.append(atom)
        else:
            found += [part for part in whole(atom.parts) if not known(part.size == 1)]
    return tuple(found)


def settled(arrangement: Arrangement) -> Arrangement:
    """Apply `whole` to every dimension."""
    return tuple(whole(dimension) for dimension in arrangement)


def atoms_of(arrangement: Arrangement) -> list[Atom]:
    """Return all atoms, the slowest index first."""
    return [atom for dimension in settled(arrangement) for atom in dimension]


def size_of(atoms: Iterable[Atom]) -> Size:
    """Return the product of the atoms' sizes."""
    return prod(atom.size for atom in whole(atoms))


def viewed(arrangement: Arrangement, shape: Sequence[Size]) -> Arrangement | None:
    """Return the arrangement of ``x.view(shape)``, or None. A -1 in the shape is already resolved."""
    left = atoms_of(arrangement)
    made: list[Dimension] = []
    for size in shape:
        taken = take(left, size)
        if taken is None:
            return None
        made.append(taken)
    return None if left else settled(tuple(made))


def take(atoms: list[Atom], size: Size) -> Dimension | None:
    """Remove atoms with a total size of ``size`` from the front of the list, and return them, or None if impossible.

    The last one is cut if necessary.
    """
    taken: list[Atom] = []
    missing = size
    while not known(missing == 1):
        if not atoms:
            return None
        atom = atoms.pop(0)
        if known(atom.size == 0):  # an empty tensor has no elements to locate
            return None
        rest = missing // atom.size
        if known(rest * atom.size == missing):
            taken.append(atom)
            missing = rest
        elif atom.cut(missing):
            assert atom.parts is not None
            taken.append(atom.parts[0])
            atoms.insert(0, atom.parts[1])
            missing = 1
        else:
            return None
    return tuple(taken)


def permuted(arrangement: Arrangement, order: Sequence[int]) -> Arrangement:
    """Return the arrangement of ``x.permute(order)``."""
    return tuple(arrangement[dim] for dim in order)


def moved(arrangement: Arrangement, chunks: Size, source: int, target: int) -> Arrangement | None:
    """Return the arrangement of ``cat(x.chunk(chunks, dim=source), dim=target)``, or None."""
    dimensions = list(settled(arrangement))
    left = list(dimensions[source])
    front = take(left, chunks)
    if front is None:
        return None
    dimensions[source] = tuple(left)
    dimensions[target] = front + dimensions[target]
    return settled(tuple(dimensions))
