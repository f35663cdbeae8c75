"""Where the stages begin in the graph of a traced model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from torch import fx

from .layers import is_inside
from .trace.tracer import Traced

Begins = Mapping[fx.Node, int]
"""For each stage that does not begin where the first one does, its first node."""


def at_layers(traced: Traced, sizes: Sequence[int]) -> Begins:
    """Return where the stages begin if they have ``sizes`` calls of layers: each at its first one."""
    return {traced.layers[start]: index for index, start in enumerate(accumulate(sizes[:-1]), 1)}


def where_modules_are(traced: Traced, stages: Sequence[int], names: Sequence[Sequence[str]]) -> Begins:
    """Return where the stages begin if the model calls only some of the layers for which it has been cut.

    Args:
        stages: for each call of a layer, the stage that has it.
        names: for each stage, the names of its modules, parameters and buffers.
    """
    of_layers = dict(zip(traced.layers, stages, strict=True))
    begins: dict[fx.Node, int] = {}
    stage = 0
    for node in traced.graph.nodes:
        for name in _used(node, traced):
            having = [index for index, held in enumerate(names) if any(is_inside(name, each) for each in held)]
            if node in of_layers:
                having = [of_layers[node]]
            if stage not in having and (later := [index for index in having if index > stage]):
                stage = begins[node] = later[0]
    return begins


def stages_of_fewer(calls: Sequence[str], all_calls: Sequence[str], sizes: Sequence[int]) -> list[int] | None:
    """Return the stage of each call if ``calls`` are some of the calls for which a model has been cut, in their order.

    Args:
        calls, all_calls: the names of the layers.
        sizes: how many of all calls each stage has.
    """
    stages = (index for index, size in enumerate(sizes) for _ in range(size))
    left = zip(all_calls, stages, strict=True)
    found = [next((stage for name, stage in left if name == wanted), None) for wanted in calls]
    return None if None in found else [stage for stage in found if stage is not None]


def _used(node: fx.Node, traced: Traced) -> Iterator[str]:
    """Return the names of the modules that a node calls, and of the parameters and buffers that it uses."""
    yield from (call.name for call in traced.calls.get(node, ()))
    yield from (str(each.target) for each in node.all_input_nodes if each.op == "get_attr")
