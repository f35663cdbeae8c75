"""Rewrite other forms of the collectives to the plain form, if a matmul feeds or follows them.

The other patterns look for the plain form only. The other forms are coalesced collectives, which carry several tensors
at once, and collectives that write into a preallocated tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from .._torch import auto_functionalized
from ..choices import Choices
from ..writer import Writer
from .all_gather import AllGather
from .all_reduce import AllReduce
from .pattern import Pattern, c10d
from .reduce_scatter import ReduceScatter

_COALESCED: dict[Any, type[Pattern]] = {
    c10d.all_gather_into_tensor_coalesced.default: AllGather,
    c10d.reduce_scatter_tensor_coalesced.default: ReduceScatter,
    c10d.all_reduce_coalesced.default: AllReduce,
}
_INTO_GIVEN: dict[Any, tuple[type[Pattern], tuple[str, ...]]] = {
    c10d.all_gather_into_tensor_out.default: (AllGather, ("input", "group_size", "group_name")),
}
if hasattr(c10d, "reduce_scatter_tensor_out"):  # since torch 2.13
    _INTO_GIVEN[c10d.reduce_scatter_tensor_out.default] = (
        ReduceScatter,
        ("input", "reduce_op", "group_size", "group_name"),
    )


def make_plain(graph: Graph, choices: Choices) -> None:
    """Rewrite the collectives of other forms that have a matmul beside them."""
    for node in list(graph.nodes):
        pattern = _COALESCED.get(node.target)
        if pattern is not None and all(user.target is operator.getitem for user in node.users):
            tensors, *others = node.args
            assert isinstance(tensors, (list, tuple))
            calls = [(tensor, *others) for tensor in tensors]
            _rewrite(graph, node, pattern, calls, choices)
        elif node.target is auto_functionalized and node.args[0] in _INTO_GIVEN and not node.kwargs["_all_bases"]:
            # The preallocated tensor is new: otherwise torch would have listed it in `_all_bases`.
            pattern, names = _INTO_GIVEN[node.args[0]]
            _rewrite(graph, node, pattern, [[node.kwargs[name] for name in names]], choices)


def _rewrite(
    graph: Graph, node: Node, pattern: type[Pattern], calls: Sequence[Sequence[Any]], choices: Choices
) -> None:
    """Replace a node, or the items that are taken out of it, by plain collectives, one for each call."""
    write = Writer(graph, node)
    singles = [write.call(pattern.target, *call) for call in calls]
    items = [user for user in node.users if user.target is operator.getitem]
    taken = [(item, singles[_index(item)]) for item in items] or [(node, singles[0])]
    for user, single in taken:
        user.replace_all_uses_with(single)
    if any(pattern(graph, single, choices).candidate for single in singles):
        for item in items:
            graph.erase_node(item)
        graph.erase_node(node)
        return
    for user, single in taken:
        single.replace_all_uses_with(user)
    write.undo()


def _index(item: Node) -> int:
    index: Any = item.args[1]
    return int(index)
