"""Rewrite matmuls of a batch of one to matmuls of matrices. ``torch.einsum`` makes such batches, for example."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from .._torch import known
from ..graph import aten, is_tensor, value
from ..writer import SymbolicSizeError, Writer

_OF_MATRICES: dict[Any, Any] = {aten.bmm.default: aten.mm.default, aten.baddbmm.default: aten.addmm.default}


def unbatch(graph: Graph) -> None:
    """Rewrite the batches of one in a graph that has collectives."""
    if not any(getattr(node.target, "namespace", "") == "_c10d_functional" for node in graph.nodes):
        return
    for node in list(graph.nodes):
        # Nodes of a user's own pass may have no values.
        if node.target in _OF_MATRICES and all(map(is_tensor, (node, *node.args))) and known(value(node).shape[0] == 1):
            _rewrite(graph, node)


def _rewrite(graph: Graph, node: Node) -> None:
    write = Writer(graph, node)
    matrices: Any = node.args
    try:
        # The bias may have fewer dimensions than the batch, or only one number in the first.
        args = [write.reshape(each, value(each).shape[1:]) if value(each).dim() == 3 else each for each in matrices]
        new = write.like(write.call(_OF_MATRICES[node.target], *args, **node.kwargs), node)
    except (SymbolicSizeError, ValueError):
        write.undo()
        return
    node.replace_all_uses_with(new)
    graph.erase_node(node)
