"""Where the stages begin in the graph of a traced model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import accumulate

from torch import fx

from .layers import is_inside
from .trace.tracer import Traced

Begins = Mapping[fx.Node, int]
"""The first node of each stage but the first one, with the index of the stage. A stage without nodes is left out."""


def at_layers(traced: Traced, sizes: Sequence[int]) -> Begins:
    """Return where the stages begin if they have ``sizes`` calls of layers: each at its first one."""
    return {traced.layers[start]: index for index, start in enumerate(accumulate(sizes[:-1]), 1)}


def where_modules_are(traced: Traced, names: Sequence[Sequence[str]], anywhere: Set[str]) -> Begins:
    """Return where the stages begin if the model does not call the layers for which it has been cut, but some of them,
    for example: each where the stages before it do not have what a node uses.

    Args:
        names: for each stage, the names of its modules, parameters and buffers.
        anywhere: the names of modules that any stage may have.
    """
    begins: dict[fx.Node, int] = {}
    stage = 0
    for node in traced.graph.nodes:
        for name in sorted(_used(node, traced) - anywhere):  # in the same order on all ranks
            having = [index for index, held in enumerate(names) if any(is_inside(name, each) for each in held)]
            if stage not in having and (later := [index for index in having if index > stage]):
                stage = begins[node] = later[0]
    return begins


def _used(node: fx.Node, traced: Traced) -> set[str]:
    """Return the names of the modules that a node calls, and of the parameters and buffers that it uses."""
    called = {traced.calls[node].name} if node in traced.calls else set()
    return called | {str(each.target) for each in node.all_input_nodes if each.op == "get_attr"}
