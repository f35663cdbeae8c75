"""Find out whether a model keeps something of one batch for the next. Stages would not, since the tracer runs the code
between layers on attributes that are still None.

The model is traced for two batches, one after the other. Values that depend on neither batch may be kept, as caches do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx

from .calls import WHOLE_MODULE, Call
from .effects import touched
from .trace_error import TraceError


def require_nothing_kept(
    graph: fx.Graph, batches: Sequence[Collection[str]], calls: Mapping[int, Call], filled: Collection[str]
) -> None:
    """Check that a model does with the second of two batches what it does with the first, and needs none of its values.

    Args:
        graph: what it does with both.
        batches: for each batch, the names of the nodes that are its tensors.
        calls: the calls of whole modules, by their number in the graph.
        filled: the names of the attributes that it has filled.

    Raises:
        TraceError: it does not.
    """
    for node in graph.nodes:
        if node.target is WHOLE_MODULE:
            node.meta["call"] = calls[node.args[1]]
    done: list[list[object]] = [[], []]
    for node, origins in _origins(graph, batches).items():
        if len(origins) == 2:
            raise TraceError(_message(filled))
        if origins and node.op == "call_function":
            done[origins.pop()].append(_operation(node))
    if done[0] != done[1]:
        raise TraceError(_message(filled))


def _origins(graph: fx.Graph, batches: Sequence[Collection[str]]) -> dict[fx.Node, set[int]]:
    """Return for each node but the output the indices of the batches that its value depends on."""
    found: dict[fx.Node, set[int]] = {}
    base: dict[fx.Node, fx.Node] = {}  # for a view, what it is a view of
    for node in graph.nodes:
        if node.op == "output":
            break
        found[node] = {index for index, names in enumerate(batches) if node.name in names}
        shared, changed = touched(node)
        base[node] = base[shared[0]] if shared else node
        found[node].update(*(found[other] | found[base[other]] for other in node.all_input_nodes))
        for other in changed:
            if base[other].op != "placeholder":  # what buffers keep, the stages keep too
                found[base[other]] |= found[node]
    return found


def _operation(node: fx.Node) -> object:
    """Return what a node does, without its tensors."""
    if node.target is WHOLE_MODULE:
        call: Call = node.meta["call"]
        return call.name, call.given.constants
    constants: Any = fx.map_arg((node.args, node.kwargs), lambda argument: None)
    return str(node.target), repr(constants)


def _message(filled: Collection[str]) -> str:
    names = ", ".join(sorted(filled))
    return (
        f"the model does something else with a second batch than with the first, or needs a value of the first: it "
        f"fills {names}, which the stages would not. Keep such values in buffers that are changed in place (add_, "
        "copy_), or in a module that has no layers inside"
    )
