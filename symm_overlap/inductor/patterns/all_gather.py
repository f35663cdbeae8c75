"""Match ``all_gather(shard, dim, group) @ B``, for any number of matmuls and any gathered dimension, and the gradients
of weights, ``all_gather(shard, dim, group).t() @ B``.

The pattern examines every use of the gathered tensor. The matmuls with the gathered tensor on the left share one
gather. If anything else uses the gathered tensor, the op returns it too. If all uses are gradients of weights, they
share a gather that is consumed chunk by chunk.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.fx import Graph, Node

from .._torch import known
from ..arrangement import settled
from ..choices import Choices
from ..graph import aten, same_memory, value
from ..matmul import Matmul, column_biases, is_of_different_matrices, matmul_of, why_no_matmul
from ..moved import of_parts
from ..writer import Writer
from .cast_first import why_not_first
from .gathered import Gathered, Rows, sizes_ahead
from .pattern import (
    SkipError,
    ancestors,
    c10d,
    choice_of,
    draws_between,
    path_of,
    positions,
    require_unwritten,
    writing,
)
from .quantised import MOVED_FIRST, Quantised
from .trimmed import why_trimmed_after


@dataclass(frozen=True)
class Use:
    """A matmul that uses the gathered tensor.

    Attributes:
        rows: the layout of the gathered tensor in the matrix; for a gradient, after transposing it if necessary.
        gradient: whether the rows are contracted, as in the gradient of a weight.
        right: whether the gathered tensor is the matrix on the right.
    """

    matmul: Matmul
    rows: Rows
    gradient: bool = False
    right: bool = False

    @property
    def gather_key(self) -> tuple[object, ...]:
        """Uses with an equal key can share a gather: they read it as the same dtype and, if they have scales, with an
        equal scale.
        """
        gathered = self.matmul.right if self.right else self.matmul.left
        return self.rows, value(gathered).dtype, self.gradient, self.matmul.scaled and self.matmul.scaled.left

    @property
    def other(self) -> Node:
        """The other matrix."""
        return self.matmul.left if self.right else self.matmul.right

    @property
    def width(self) -> int:
        """The columns of the other matrix in the layout that the op needs."""
        return value(self.other).shape[0 if self.right else 1]


class AllGather:
    """See `Pattern`."""

    target = c10d.all_gather_into_tensor.default
    path = ""

    def __init__(self, graph: Graph, node: Node, choices: Choices) -> None:
        self.graph, self.node, self.choices = graph, node, choices
        self.gathered = Gathered(node)
        moved = of_parts(value(self.gathered.shard), node.args[1])  # type: ignore[arg-type]
        also: int | None = node.meta.get(MOVED_FIRST, 0)
        self.moved = None if moved is None or also is None else moved + also
        self.uses: list[Use] = []
        for each in self.gathered.nodes:
            for user in each.users:
                use = self._use(each, matmul_of(user))
                if use is not None:
                    self.uses.append(use)
        self.candidate = bool(self.uses)

    def _use(self, node: Node, matmul: Matmul | None) -> Use | None:
        gathered = self.gathered
        if matmul is None or (matmul.left in gathered.nodes and matmul.right in gathered.nodes):
            return None
        *lead, columns = settled(gathered.nodes[node])
        rows = tuple(atom for dimension in lead for atom in dimension)
        ranks = gathered.ranks
        if matmul.scaled is not None and (matmul.left is not node or ranks not in rows):
            return None
        if matmul.right is node:
            if ranks not in rows or value(matmul.left).dim() != 2:
                return None
            at = rows.index(ranks)
            return Use(matmul, Rows(rows[:at], rows[at + 1 :], columns), gradient=True, right=True)
        if ranks in rows:
            at = rows.index(ranks)
            return Use(matmul, Rows(rows[:at], rows[at + 1 :], columns))
        if ranks not in columns:  # a view has cut it
            return None
        at = columns.index(ranks)
        transposed = Rows(columns[:at], columns[at + 1 :], rows)
        if at == 0 and not gathered.lies_so(transposed):
            return Use(matmul, Rows(rows, (), columns[1:], last=True))
        return Use(matmul, transposed, gradient=True)

    def fuse(self) -> int:
        """See `Pattern.fuse`."""
        gathered = self.gathered
        if not any(node.target is c10d.wait_tensor.default for node in self.node.users):
            raise SkipError("its result is used without a wait" if self.node.users else "its result is not used")
        if not self.uses:
            users = (user for node in gathered.nodes for user in node.users)
            reason = next(filter(None, map(why_no_matmul, users)), "")
            reason = reason or Quantised(self.graph, self.node).reason or why_not_first(gathered)
            if not reason and any(matmul_of(user) for node in gathered.lost for user in node.users):
                reason = "the gathered tensor is rearranged in a way that the pass cannot follow"
            reason = reason or why_trimmed_after(self.graph, gathered)
            self.candidate = bool(reason)
            why = "no matmul uses the gathered tensor on its left, or as the gradient of a weight does"
            if any(is_of_different_matrices(user) for node in gathered.nodes for user in node.users):
                why = "each matrix of a batch is multiplied by another one"
            raise SkipError(reason or why)
        require_unwritten([gathered.shard, *gathered.involved])
        require_unwritten(node for use in self.uses for node in (*_inputs(use), use.matmul.node))
        chosen = self._chosen()
        others = gathered.other_users({use.matmul.node for use in chosen})
        if any(node not in gathered.nodes for node in others):
            raise SkipError("a chunk of the gathered tensor is used by itself")
        if others and chosen[0].gradient:
            raise SkipError("something other than the gradient of a weight also uses the gathered tensor")
        self.path = self._path(chosen)
        self._replace(chosen, others)
        return len(chosen)

    def _chosen(self) -> list[Use]:
        """Return the uses that can share a gather: they have the same key, and their other inputs do not depend on the
        gather.
        """
        free = [use for use in self.uses if self.node not in ancestors(_inputs(use))]
        if not free:
            raise SkipError("the other matrix depends on the gathered tensor too")
        first = next((use for use in free if not use.gradient), free[0])
        alike = [use for use in free if use.gather_key == first.gather_key]
        # The op comes after the inputs of all matmuls, and whatever reads the gathered tensor comes after the op.
        position, involved = positions(self.graph), self.gathered.involved
        readers = (user for node in involved for user in node.users if user not in involved)
        earliest = min(readers, key=position.__getitem__)
        chosen = [use for use in alike if not any(draws_between(position, earliest, each) for each in _inputs(use))]
        if not chosen:
            raise SkipError("random numbers would be drawn in another order")
        return chosen

    def _path(self, chosen: Sequence[Use]) -> str:
        first = chosen[0]
        shape = value(first.matmul.right if first.right else first.matmul.left).shape
        m, k = prod(shape[:-1]), shape[-1]
        if first.gradient and not first.right:
            m, k = k, m
        n = sum(use.width for use in chosen)
        group: str = self.node.args[2]  # type: ignore[assignment]
        like = value(self.gathered.shard)
        op = "all_gather_matmul" if first.matmul.scaled is None else "all_gather_scaled_matmul"
        last = first.rows.last
        choice = choice_of(self.choices, op, m, n, k, like, group, last_dim=last, one_matmul=not first.gradient)
        return path_of(self.choices, choice)

    def _replace(self, chosen: list[Use], others: list[Node]) -> None:
        position = positions(self.graph)
        # After the last of its inputs. Users of the outputs may come before that, because the graph is sorted later.
        inputs = [node for use in chosen for node in _inputs(use)]
        last_input = max((self.node, *inputs), key=position.__getitem__)
        with writing(self.graph, last_input.next) as write:
            new = self._gradients(write, chosen) if chosen[0].gradient else self._products(write, chosen, others)
        for node, replacement in new.items():
            node.replace_all_uses_with(replacement)
        old = {*self.gathered.involved, *(use.matmul.node for use in chosen)}
        for node in sorted(old, key=position.__getitem__, reverse=True):
            if not node.users:  # the others rearrange the tensor that the op returns
                self.graph.erase_node(node)

    def _products(self, write: Writer, chosen: list[Use], others: list[Node]) -> dict[Node, Node]:
        """Write the op. Return the new nodes for the products, and for the gathered tensor if others use it."""
        rows, group = chosen[0].rows, self.node.args[2]
        shard, dim = self.gathered.shard_for(write, rows, value(chosen[0].matmul.left).dtype)
        weights = [use.other for use in chosen]
        if chosen[0].matmul.scaled is None:
            biases = column_biases(write, [use.matmul for use in chosen])
            given = [] if biases is None else [biases]
            fused = write.op("fused_all_gather_matmul", shard, weights, dim, group, *given, return_A=bool(others))
        else:
            scales = self._scales(write, chosen)
            fused = write.op(
                "fused_all_gather_scaled_matmul",
                *(shard, weights, *scales[:2], dim, group, *scales[2:]),
                return_A=bool(others),
            )
        products = write.call(operator.getitem, fused, 1)
        new = _taken_out(write, products, chosen, [use.matmul.other_bias for use in chosen])
        if others:
            A = write.call(operator.getitem, fused, 0)
            new |= self._others(write, A, rows, others)
        return new

    def _others(self, write: Writer, A: Node, rows: Rows, others: list[Node]) -> dict[Node, Node]:
        """Return the gathered tensor ``A`` in the arrangements in which something else uses it.

        Copies stay copies, because the program may write to one of them.
        """
        new: dict[Node, Node] = {}
        for node in others:
            made = self.gathered.rearranged(write, A, rows, node)
            if not same_memory(node, others[0]) and same_memory(made, A):
                made = write.call(aten.clone.default, made)
            new[node] = made
        return new

    def _scales(self, write: Writer, chosen: list[Use]) -> list[Any]:
        """Return the arguments of a scaled op besides the shard, the weights, the dimension and the group."""
        scaled = [use.matmul.scaled for use in chosen if use.matmul.scaled is not None]
        of_left = scaled[0].left
        if not known(value(of_left).numel() == 1):  # one scale for every gathered row
            of_left = write.reshape(of_left, [*sizes_ahead(chosen[0].rows, self.gathered.ranks.size), 1])
        return [
            of_left,
            [each.right for each in scaled],
            [use.matmul.bias for use in chosen],
            [each.result for each in scaled],
            [each.dtype for each in scaled],
            [each.fast for each in scaled],
        ]

    def _gradients(self, write: Writer, chosen: list[Use]) -> dict[Node, Node]:
        """Write the op. Return the new nodes for the gradients of weights."""
        rows, group = chosen[0].rows, self.node.args[2]
        shard, dim = self.gathered.shard_for(write, rows, value(self.gathered.shard).dtype)
        grads = []
        for use in chosen:
            grad = write.call(aten.permute.default, use.other, [1, 0]) if use.right else use.other
            grads.append(write.reshape(grad, [*sizes_ahead(rows, self.gathered.ranks.size), use.width]))
        made = write.op("all_gather_weight_grad", shard, grads, dim, group)
        return _taken_out(write, made, chosen, [use.matmul.bias for use in chosen])


def _inputs(use: Use) -> list[Node]:
    """Return the inputs of the matmul other than the gathered tensor."""
    gathered = use.matmul.right if use.right else use.matmul.left
    return [node for node in use.matmul.inputs if node is not gathered]


def _taken_out(write: Writer, outputs: Node, chosen: Sequence[Use], biases: Sequence[Node | None]) -> dict[Node, Node]:
    """Return for every matmul the node that replaces it: the op's output, with the bias added that the op has not."""
    new = {}
    for index, (use, bias) in enumerate(zip(chosen, biases, strict=True)):
        product = write.call(operator.getitem, outputs, index)
        if use.right:
            product = write.call(aten.permute.default, product, [1, 0])
        product = write.like(product, use.matmul.node)
        if bias is not None:
            product = write.call(aten.add.Tensor, product, bias)
        new[use.matmul.node] = product
    return new
