"""Add first and reduce afterwards, where reduced tensors are added.

Tensor parallelism produces such sums if several layers have one input, and each reduces its gradient by itself, as in
transformers: ``reduce(a @ b) + reduce(c @ d)``. One reduction of the sum sends as many bytes as one of theirs. The
numbers are added in another order, so results differ by rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Graph, Node

from ..choices import Choices
from ..graph import aten
from ..writer import Writer
from .all_reduce import AllReduce
from .pattern import SkipError, c10d, require_unwritten, writing
from .reduce_scatter import ReduceScatter
from .sums import is_plain_sum

_PATTERNS: dict[Any, type[AllReduce | ReduceScatter]] = {each.target: each for each in (AllReduce, ReduceScatter)}


class _Term(NamedTuple):
    """A tensor, and the node that adds it."""

    node: Node
    adder: Node

    @property
    def alone(self) -> bool:
        """Whether nothing else uses the tensor, and it is added once."""
        return set(self.node.users) == {self.adder} and self.adder.args[0] is not self.adder.args[1]

    @property
    def reduction(self) -> Node | None:
        """The collective whose result is the tensor, if nothing else uses it, and if it commutes with adding."""
        collective: Any = self.node.args[0] if self.node.target is c10d.wait_tensor.default and self.alone else None
        if collective is None or collective.target not in _PATTERNS or set(collective.users) != {self.node}:
            return None
        return collective if collective.args[1] in ("sum", "avg") else None


def add_first(graph: Graph, choices: Choices) -> None:
    """Write one reduction wherever the results of several are added, if a matmul feeds one of them, and if the
    reduction of their sum can be fused.
    """
    for node in list(graph.nodes):
        if _is_sum(node) and not any(_is_sum(user) and _Term(node, user).alone for user in node.users):
            merged: Node | None = node
            while merged is not None and _is_sum(merged):  # again for reductions of another kind
                merged = _merge(graph, merged, choices)


def _is_sum(node: Node) -> bool:
    return node.target is aten.add.Tensor and is_plain_sum(node)


def _terms_of(node: Node) -> tuple[list[_Term], list[Node]]:
    """Return the terms of a sum, from left to right, and the sums that it consists of."""
    found: list[_Term] = []
    sums: list[Node] = []
    left = [_Term(node, node)]
    while left:
        term = left.pop()
        if term.node is node or (_is_sum(term.node) and term.alone):
            sums.append(term.node)
            left += [_Term(operand, term.node) for operand in reversed(term.node.args[:2])]  # type: ignore[arg-type]
        else:
            found.append(term)
    return found, sums


def _merge(graph: Graph, node: Node, choices: Choices) -> Node | None:
    """Merge reductions of one kind among the terms of a sum. Return the new sum, or None if nothing was merged."""
    terms, sums = _terms_of(node)
    alike: dict[Any, dict[_Term, Node]] = {}
    for term in terms:
        if (reduction := term.reduction) is not None:
            alike.setdefault((reduction.target, *reduction.args[1:]), {})[term] = reduction
    for merged in alike.values():
        reductions = [*merged.values()]
        if len(merged) > 1 and any(_PATTERNS[each.target](graph, each, choices).candidate for each in reductions):
            others = [term.node for term in terms if term not in merged]
            new = _replaced(graph, node, reductions, others, choices)
            if new is not None:
                for old in [*sums, *(term.node for term in merged), *reductions]:
                    graph.erase_node(old)
                return new
    return None


def _replaced(graph: Graph, node: Node, reductions: list[Node], others: list[Node], choices: Choices) -> Node | None:
    """Replace a sum by that of one reduction and the other terms. Return None, and leave the graph as it is, if the
    reduction could not be fused.
    """
    target: Any = reductions[0].target
    tensors: list[Any] = [each.args[0] for each in reductions]
    try:
        require_unwritten([*tensors, *others])
        with writing(graph, node) as write:
            collective = write.call(target, _added(write, tensors), *reductions[0].args[1:])
            collective.meta["stack_trace"] = reductions[0].meta.get("stack_trace")
            whole = write.like(_added(write, [write.call(c10d.wait_tensor.default, collective), *others]), node)
            try:
                for each in reductions:
                    each.update_arg(0, collective)  # for now, so that these nodes do not use the tensors any more
                _PATTERNS[target](graph, collective, choices).check()
            finally:
                for each, tensor in zip(reductions, tensors, strict=True):
                    each.update_arg(0, tensor)
    except SkipError:
        return None
    node.replace_all_uses_with(whole)
    return whole


def _added(write: Writer, tensors: list[Node]) -> Node:
    first, *others = tensors
    for each in others:
        first = write.call(aten.add.Tensor, first, each)
    return first
