"""Add first and reduce afterwards, where reduced tensors are added.

Tensor parallelism produces such sums if several layers have one input, and each reduces its gradient by itself, as in
transformers: ``reduce(a @ b) + reduce(c @ d)``. So does a layer of experts beside an expert that all tokens share:
``all_reduce(experts).view(...) + all_reduce(a @ b)``. One reduction of the sum sends as many bytes as one of theirs.
The numbers are added in another order, so results differ by rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Graph, Node

from ..choices import Choices
from ..graph import VIEWS, aten, step_of, value
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
    def reduced(self) -> _Reduced | None:
        """The collective whose result is the tensor, if nothing else uses it, and if it commutes with adding."""
        wait, views = self.node, list[Node]()
        while (step := step_of(wait)) is not None and not step.through and _alone(wait):
            views.insert(0, wait)
            wait = step.source
        collective: Any = wait.args[0] if wait.target is c10d.wait_tensor.default and _alone(wait) else None
        if collective is None or not self.alone or collective.target not in _PATTERNS or not _alone(collective):
            return None
        # A view of scattered parts would be another view of the whole sum.
        whole = not views or (collective.target is AllReduce.target and _same_dtype(views))
        return _Reduced(collective, wait, views) if whole and collective.args[1] in ("sum", "avg") else None


class _Reduced(NamedTuple):
    """A collective, the node that waits for its result, and the nodes that rearrange the result, one after another."""

    collective: Node
    wait: Node
    views: list[Node]

    @property
    def nodes(self) -> list[Node]:
        """All these nodes, those that use others first."""
        return [*reversed(self.views), self.wait, self.collective]

    def rearranged(self, write: Writer) -> Node:
        """Return what the collective reduces, rearranged in the same way."""
        found: Any = self.collective.args[0]
        for view in self.views:
            # What is reduced may have other strides than the result.
            target: Any = aten.reshape.default if view.target in VIEWS else view.target
            found = write.call(target, found, *view.args[1:], **view.kwargs)
        return found  # type: ignore[no-any-return]


def _alone(node: Node) -> bool:
    return len(node.users) == 1


def _same_dtype(views: list[Node]) -> bool:
    return len({value(node).dtype for view in views for node in (view, view.args[0])}) == 1  # type: ignore[arg-type]


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
    alike: dict[Any, dict[_Term, _Reduced]] = {}
    for term in terms:
        if (reduced := term.reduced) is not None:
            collective = reduced.collective
            alike.setdefault((collective.target, *collective.args[1:]), {})[term] = reduced
    for merged in alike.values():
        if len(merged) > 1 and any(_pattern(graph, each.collective, choices).candidate for each in merged.values()):
            others = [term.node for term in terms if term not in merged]
            new = _replaced(graph, node, [*merged.values()], others, choices)
            if new is not None:
                for old in [*sums, *(old for each in merged.values() for old in each.nodes)]:
                    graph.erase_node(old)
                return new
    return None


def _replaced(graph: Graph, node: Node, merged: list[_Reduced], others: list[Node], choices: Choices) -> Node | None:
    """Replace a sum by that of one reduction and the other terms. Return None, and leave the graph as it is, if the
    reduction could not be fused.
    """
    first = merged[0].collective
    target: Any = first.target
    tensors: list[Any] = [each.collective.args[0] for each in merged]
    try:
        require_unwritten([*tensors, *others])
        with writing(graph, node) as write:
            collective = write.call(target, _added(write, [each.rearranged(write) for each in merged]), *first.args[1:])
            collective.meta["stack_trace"] = first.meta.get("stack_trace")
            whole = write.like(_added(write, [write.call(c10d.wait_tensor.default, collective), *others]), node)
            try:
                for each in merged:
                    each.collective.update_arg(0, collective)  # for now, so that it does not use the tensor any more
                _pattern(graph, collective, choices).check()
            finally:
                for each, tensor in zip(merged, tensors, strict=True):
                    each.collective.update_arg(0, tensor)
    except SkipError:
        return None
    node.replace_all_uses_with(whole)
    return whole


def _pattern(graph: Graph, collective: Node, choices: Choices) -> AllReduce | ReduceScatter:
    target: Any = collective.target
    return _PATTERNS[target](graph, collective, choices)


def _added(write: Writer, tensors: list[Node]) -> Node:
    first, *others = tensors
    for each in others:
        first = write.call(aten.add.Tensor, first, each)
    return first
