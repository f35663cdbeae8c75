"""What a node of a traced graph changes: its arguments in place, and the buffers of the modules that it calls."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .._torch import VMAP_VIEWS, HigherOrderOperator, OpOverload
from .calls import WHOLE_MODULE, Call
from .vmapped import Vmapped
from .writes import STATISTICS, arguments


@dataclass(frozen=True, eq=False)
class Constant:
    """The target of a node that returns a value which the tracer found in the model's code."""

    value: Any

    def __call__(self) -> Any:
        return self.value

    __name__ = "constant"


def has_effects(node: fx.Node, call: Call | None) -> bool:
    """True if a node must run even if nothing needs what it returns.

    Args:
        call: the whole module that it calls, if it calls one.
    """
    return node.is_impure() or bool(touched(node)[1]) or (call is not None and bool(call.changed or call.updated))


def touched(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the arguments that may share memory with what a node returns, and the arguments that it changes."""
    if node.target is operator.getitem:
        return node.all_input_nodes, []
    if node.target is WHOLE_MODULE:
        tensors = node.args[0]
        assert isinstance(tensors, (list, tuple))
        call = node.meta["call"]
        return _nodes([tensors[index] for index in call.shared]), _nodes([tensors[index] for index in call.changed])
    if isinstance(node.target, HigherOrderOperator):
        return [], _changed_inside(node)
    if isinstance(node.target, Vmapped):
        return node.all_input_nodes, _changed_by(node.target.graph, node.args)
    shared: list[fx.Node] = []
    changed: list[fx.Node] = []
    if isinstance(node.target, OpOverload):
        for value, shares, writes in arguments(node.target, node.args, node.kwargs):
            found = _nodes(value if isinstance(value, (list, tuple)) else [value])
            shared += found if shares else []
            changed += found if writes else []
    return shared, changed


def uses_statistics(node: fx.Node) -> bool:
    """True if a norm uses running statistics, which it changes in training: in evaluation too they are in one stage."""
    names = [argument.name for argument in node.target._schema.arguments] if isinstance(node.target, OpOverload) else []
    values = dict(zip(names, node.args, strict=False))
    return any(isinstance(values.get(name), fx.Node) for name in STATISTICS)


def _nodes(values: Sequence[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _changed_inside(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that are changed by the graphs that an operator has, as `torch.cond`."""
    changed: list[fx.Node] = []
    for place, argument in enumerate(node.args):
        module = graph_in(argument) if isinstance(argument, fx.Node) else None
        if module is not None:
            changed += _changed_by(module.graph, node.args[place + 1 :])
    return changed


def _changed_by(graph: fx.Graph, args: Sequence[Any]) -> list[fx.Node]:
    """Return the arguments of a graph that it changes."""
    changed: list[fx.Node] = []
    given = dict(zip(graph.find_nodes(op="placeholder"), args, strict=False))
    origins = {inner: {inner} for inner in given}
    for inner in graph.nodes:
        shared, written = touched(inner)
        if inner.target in VMAP_VIEWS:
            shared = inner.all_input_nodes
        origins.setdefault(inner, set()).update(*(origins.get(other, set()) for other in (*shared, *written)))
        changed += _nodes([given[origin] for other in written for origin in origins.get(other, ())])
    return changed


def graph_in(node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a node returns, if it does."""
    value = node.target.value if isinstance(node.target, Constant) else None
    if node.op == "get_attr" and node.graph.owning_module is not None:
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    return value if isinstance(value, fx.GraphModule) else None
