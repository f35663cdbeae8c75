"""``torch.vmap`` between layers, for example around the mask functions of Hugging Face.

In a traced graph, one call of vmap is many nodes: one begins it, others add its dimension to tensors, compute with
these, and remove the dimension, and one ends it. They only work together. So they become one node, which runs them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from .._torch import begin_vmap, end_vmap, ending_vmaps
from .modes import Modes, run_in_modes


@dataclass(frozen=True, eq=False)
class Vmapped:
    """The target of a node that runs one call of vmap.

    Attributes:
        graph: what it computes. The placeholders are what it uses.
        code: what runs the graph.
    """

    graph: fx.Graph
    code: fx.GraphModule

    def __call__(self, *values: Any) -> list[Any]:
        with ending_vmaps():
            return list(self.code(*values))

    __name__ = "vmapped"


def _vmapped(graph: fx.Graph) -> Vmapped:
    runs = deepcopy(graph)
    for node in runs.nodes:
        run_in_modes(node)
    return Vmapped(graph, fx.GraphModule(nn.Module(), runs))


def fold(graph: fx.Graph) -> None:
    """Replace the nodes of each call of vmap in a graph by one node."""
    depth = 0
    call: list[fx.Node] = []
    for node in list(graph.nodes):
        depth += node.target is begin_vmap
        if depth:
            call.append(node)
        depth -= node.target is end_vmap
        if call and not depth:
            _replace(graph, call)
            call = []


def _replace(graph: fx.Graph, call: Sequence[fx.Node]) -> None:
    inside = set(call)
    given = list(dict.fromkeys(each for node in call for each in node.all_input_nodes if each not in inside))
    returned = [node for node in call if any(user not in inside for user in node.users)]
    inner = fx.Graph()
    copied = {each: inner.placeholder(each.name) for each in given}
    for node in call:
        copied[node] = inner.node_copy(node, copied.__getitem__)
    inner.output(tuple(copied[node] for node in returned))
    with graph.inserting_after(call[-1]):
        whole = graph.call_function(_vmapped(inner), tuple(given))
    whole.meta = dict(call[0].meta, val=[node.meta.get("val") for node in returned], modes=Modes())
    for number, node in reversed([*enumerate(returned)]):
        with graph.inserting_after(whole):
            part = graph.call_function(operator.getitem, (whole, number))
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part, lambda user: user not in inside)
    for node in reversed(call):
        graph.erase_node(node)
