"""A gathered tensor in a graph: every node that has the same elements after views, permutations and concatenation of
chunks."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from .._torch import known
from ..arrangement import Arrangement, Atom, Dimension, Size, atoms_of, of_shape, size_of, whole
from ..graph import SAME, aten, step_of, value
from ..writer import SymbolicSizeError, Writer
from .pattern import c10d

_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, operator.getitem)
CHUNKS = (*_SPLITS, *SAME, aten.view.dtype)
"""What may be between a gathered tensor and a concatenation of its chunks."""


@dataclass(frozen=True)
class Rows:
    """The layout of the gathered tensor as a matrix whose rows, or columns, come from all ranks.

    Attributes:
        before, after: the atoms of the rows before and after the atom of the ranks; with ``last``, all are before.
        columns: the columns of one rank's shard.
        last: whether ranks have blocks of columns.
    """

    before: Dimension
    after: Dimension
    columns: Dimension
    last: bool = False

    @property
    def of_shard(self) -> list[Atom]:
        """The atoms of a shard in the memory order that the ops need."""
        return list(whole((*self.before, *self.after, *self.columns)))


class Gathered:
    """The result of an all-gather.

    Attributes:
        shard: the tensor that is gathered.
        ranks: the atom whose index is the rank.
        nodes: every node that has all gathered elements, with its arrangement.
        through: nodes on the way to one of these, such as chunks.
        lost: nodes that have all gathered elements, in an arrangement that is not known.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.shard: Node = node.args[0]  # type: ignore[assignment]
        self.ranks = Atom(node.args[1])  # type: ignore[arg-type]
        self.nodes: dict[Node, Arrangement] = {}
        self.through: set[Node] = set()
        self.lost: set[Node] = set()
        if not any(known(size == 0) for size in value(node).shape):
            first, *others = of_shape(value(self.shard).shape)
            self._follow(node, ((self.ranks, *first), *others))

    def _follow(self, node: Node, arrangement: Arrangement) -> None:
        self.nodes[node] = arrangement
        left = list(node.users)
        while left:
            user = left.pop()
            step = step_of(user)
            if user.target is c10d.wait_tensor.default and user.args[0] is node:
                self._follow(user, arrangement)
            elif step is not None and step.source is node:
                found = step.arrange(arrangement)
                if found is None:
                    self.lost.update(_same_elements(user))
                elif user not in self.nodes:
                    self.through.update(step.through)
                    self._follow(user, found)
            elif user.target in CHUNKS:
                left += user.users

    @property
    def involved(self) -> set[Node]:
        """All nodes of ``nodes`` and ``through``."""
        return {*self.nodes, *self.through}

    def other_users(self, matmuls: set[Node]) -> list[Node]:
        """Return the involved nodes that something other than these matmuls uses."""
        involved = self.involved
        return [node for node in involved if not set(node.users) <= involved | matmuls]

    def lies_so(self, rows: Rows) -> bool:
        """True if a shard has the memory order that ``rows`` needs."""
        return rows.of_shard == self._base()

    def _base(self) -> list[Atom]:
        return [atom for atom in atoms_of(self.nodes[self.node]) if atom is not self.ranks]

    def shard_for(self, write: Writer, rows: Rows, dtype: torch.dtype) -> tuple[Node, int]:
        """Return the shard in the layout that the ops need, and the dimension that is gathered."""
        base, order, shard = self._base(), rows.of_shard, write.of_dtype(self.shard, dtype)
        if order != base:
            atoms = write.reshape(shard, [atom.size for atom in base])
            shard = write.call(aten.permute.default, atoms, permutation(base, order))
        before, after, columns = (size_of(part) for part in (rows.before, rows.after, rows.columns))
        if rows.last:
            return write.reshape(shard, [before, columns]), 1
        shape: list[Size] = [after, columns] if known(before == 1) else [before, after, columns]
        return write.reshape(shard, shape), len(shape) - 2

    def rearranged(self, write: Writer, A: Node, rows: Rows, node: Node) -> Node:
        """Return the gathered tensor ``A`` that an op returns, in the arrangement of ``node``."""
        ahead, behind = ((), (self.ranks,)) if rows.last else ((self.ranks,), ())
        order = list(whole((*rows.before, *ahead, *rows.after, *behind, *rows.columns)))
        flat = atoms_of(self.nodes[node])
        if flat != order:
            atoms = write.reshape(A, [atom.size for atom in order])
            A = write.call(aten.permute.default, atoms, permutation(order, flat))
        return write.like(A, node)


def _same_elements(node: Node) -> Iterator[Node]:
    yield node
    for user in node.users:
        step = step_of(user)
        if step is not None and step.source is node:
            yield from _same_elements(user)


def permutation(given: Sequence[Atom], wanted: Sequence[Atom]) -> list[int]:
    """Return the order that makes ``wanted`` of ``given``.

    Raises:
        SymbolicSizeError: they are not the same atoms: of one of them it is not known whether its size is 1.
    """
    if set(given) != set(wanted):
        raise SymbolicSizeError("it is not known which dimensions have size 1")
    return [given.index(atom) for atom in wanted]


def sizes_ahead(rows: Rows, world: Size) -> Sequence[Size]:
    """Return the sizes of the gathered rows, as the leading dimensions of the ops' tensors."""
    before, after = size_of(rows.before), size_of(rows.after)
    return [world * after] if known(before == 1) else [before, world * after]
