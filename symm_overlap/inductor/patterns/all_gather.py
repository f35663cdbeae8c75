"""``all_gather(shard, dim, group) @ B``, for any number of matmuls and any dimension that is gathered.

Every use of the gathered tensor is looked at, however the tensor has been viewed, permuted and put together from
chunks. The matmuls that take it on the left share one gather. Everything else, such as the gradient of a weight, gets
the gathered tensor, which the op returns then.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Graph, Node

from .._torch import known
from ..arrangement import Arrangement, Atom, Dimension, Size, atoms_of, of_shape, settled, size_of, whole
from ..choices import Choices
from ..graph import Matmul, Writer, aten, matmul_of, step_of, value
from .pattern import SkipError, ancestors, c10d, chosen_path, ops, require_unwritten, waited, writing


@dataclass(frozen=True)
class Rows:
    """How the gathered tensor lies in a matrix.

    Attributes:
        before, after: what lies before and after the ranks' dimension in the rows; with ``last``, all is before.
        columns: the columns of one rank's shard.
        last: whether the gathered dimension is that of the columns.
    """

    before: Dimension
    after: Dimension
    columns: Dimension
    last: bool


@dataclass(frozen=True)
class Use:
    """A matmul with the gathered tensor on its left."""

    matmul: Matmul
    rows: Rows


class AllGather:
    """See `Pattern`.

    Attributes:
        nodes: the nodes that have the gathered numbers, all of them, each in its arrangement.
        through: nodes on the way to one of those, such as chunks.
    """

    target = c10d.all_gather_into_tensor.default
    path = ""

    def __init__(self, graph: Graph, node: Node, choices: Choices) -> None:
        self.graph, self.node, self.choices = graph, node, choices
        self.nodes: dict[Node, Arrangement] = {}
        self.through: set[Node] = set()
        self.uses: list[Use] = []
        self.ranks = Atom(node.args[1])  # type: ignore[arg-type]
        for wait in node.users:
            if wait.target is c10d.wait_tensor.default and not any(known(size == 0) for size in value(wait).shape):
                first, *others = of_shape(value(node.args[0]).shape)  # type: ignore[arg-type]
                self._follow(wait, ((self.ranks, *first), *others))
        self._find_uses()
        self.candidate = bool(self.uses)

    def _follow(self, node: Node, arrangement: Arrangement) -> None:
        self.nodes[node] = arrangement
        left = list(node.users)
        while left:
            user = left.pop()
            step = step_of(user)
            if step is not None and step.source is node:
                found = step.arrange(arrangement)
                if found is not None and user not in self.nodes:
                    self.through.update(step.through)
                    self._follow(user, found)
            elif user.target in (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, operator.getitem):
                left += user.users

    def _find_uses(self) -> None:
        for node, arrangement in self.nodes.items():
            for user in node.users:
                matmul = matmul_of(user)
                if matmul is None or matmul.left is not node or matmul.right in self.nodes:
                    continue
                rows, columns = settled(arrangement)
                if self.ranks in rows:
                    at = rows.index(self.ranks)
                    self.uses.append(Use(matmul, Rows(rows[:at], rows[at + 1 :], columns, False)))
                elif columns[:1] == (self.ranks,):
                    self.uses.append(Use(matmul, Rows(rows, (), columns[1:], True)))

    def fuse(self) -> int:
        """See `Pattern.fuse`."""
        waited(self.node)
        if not self.uses:
            raise SkipError("no matmul takes the gathered tensor on its left")
        involved = {*self.nodes, *self.through}
        weights = [use.matmul.right for use in self.uses]
        shard: Node = self.node.args[0]  # type: ignore[assignment]
        require_unwritten([shard, *involved, *weights, *(use.matmul.node for use in self.uses)])
        chosen = self._independent()
        if not chosen:
            raise SkipError("the other matrix depends on the gathered tensor too")
        matmuls = {use.matmul.node for use in chosen}
        others = [node for node in involved if not set(node.users) <= involved | matmuls]
        if any(node not in self.nodes for node in others):
            raise SkipError("a chunk of the gathered tensor is used by itself")
        self.path = self._path(chosen)
        self._replace(chosen, others)
        return len(chosen)

    def _path(self, chosen: list[Use]) -> str:
        first = chosen[0]
        m, k = value(first.matmul.left).shape
        n = sum(value(use.matmul.right).shape[1] for use in chosen)
        shard: Node = self.node.args[0]  # type: ignore[assignment]
        world: int = self.node.args[1]  # type: ignore[assignment]
        return chosen_path(self.choices, "all_gather_matmul", m, n, k, value(shard), world, first.rows.last)

    def _independent(self) -> list[Use]:
        """The uses that can share a gather: alike, and with weights that are there before it."""
        chosen: list[Use] = []
        for use in self.uses:
            if use.rows == self.uses[0].rows and self.node not in ancestors([use.matmul.right]):
                chosen.append(use)
        return chosen

    def _replace(self, chosen: list[Use], others: list[Node]) -> None:
        position = {node: number for number, node in enumerate(self.graph.nodes)}
        # Behind the last of its inputs. What uses the outputs may come before that: the graph is sorted in the end.
        inputs = [node for use in chosen for node in (use.matmul.right, use.matmul.bias) if node is not None]
        last_input = max((self.node, *inputs), key=position.__getitem__)
        with writing(self.graph, last_input.next) as write:
            new = self._written(write, chosen, others)
        for node, replacement in new.items():
            node.replace_all_uses_with(replacement)
        old = {self.node, *self.nodes, *self.through, *(use.matmul.node for use in chosen)}
        for node in sorted(old, key=position.__getitem__, reverse=True):
            if not node.users:  # others rearrange what the op returns
                self.graph.erase_node(node)

    def _written(self, write: Writer, chosen: list[Use], others: list[Node]) -> dict[Node, Node]:
        """What takes the place of the products, and of the gathered tensor for those who use it otherwise."""
        shard, _, group = self.node.args
        rows = chosen[0].rows
        flat, dim = self._shard(write, shard, rows)  # type: ignore[arg-type]
        weights = [use.matmul.right for use in chosen]
        fused = write.call(ops.fused_all_gather_matmul.default, flat, weights, dim, group, return_A=bool(others))
        products = write.call(operator.getitem, fused, 1)
        new = {}
        for index, use in enumerate(chosen):
            product = write.call(operator.getitem, products, index)
            product = write.like(product, use.matmul.node)
            if use.matmul.bias is not None:
                product = write.call(aten.add.Tensor, product, use.matmul.bias)
            new[use.matmul.node] = product
        if others:
            A = write.call(operator.getitem, fused, 0)
            new |= {node: self._rearranged(write, A, rows, node) for node in others}
        return new

    def _shard(self, write: Writer, shard: Node, rows: Rows) -> tuple[Node, int]:
        """The shard as the op wants it, and the dimension that is gathered."""
        gathered = atoms_of(next(iter(self.nodes.values())))  # as the collective makes it, ranks first
        base = [atom for atom in gathered if atom is not self.ranks]
        order = list(whole((*rows.before, *rows.after, *rows.columns)))
        if order != base:
            atoms = write.reshape(shard, [atom.size for atom in base])
            shard = write.call(aten.permute.default, atoms, [base.index(atom) for atom in order])
        before, after, columns = (size_of(part) for part in (rows.before, rows.after, rows.columns))
        if rows.last:
            return write.reshape(shard, [before, columns]), 1
        shape: list[Size] = [after, columns] if known(before == 1) else [before, after, columns]
        return write.reshape(shard, shape), len(shape) - 2

    def _rearranged(self, write: Writer, A: Node, rows: Rows, node: Node) -> Node:
        """The gathered tensor that the op returns, as ``node`` had it."""
        ahead, behind = ((), (self.ranks,)) if rows.last else ((self.ranks,), ())
        order = list(whole((*rows.before, *ahead, *rows.after, *behind, *rows.columns)))
        flat = atoms_of(self.nodes[node])
        if flat != order:
            atoms = write.reshape(A, [atom.size for atom in order])
            A = write.call(aten.permute.default, atoms, [order.index(atom) for atom in flat])
        return write.like(A, node)
