"""Find out what the backward of a traced model computes: nothing for what is not trained, or runs without gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from ._torch import tree_flatten
from .trace.calls import WHOLE_MODULE, Call
from .trace.effects import has_effects
from .trace.modes import modes_of
from .trace.tracer import Traced
from .trace.watch import memory_of

_WITHOUT_GRADIENTS = {torch.ops.aten.detach.default, torch.ops.aten.detach_.default}


def backward_of_calls(traced: Traced, model: nn.Module) -> list[tuple[float, float]]:
    """Return how long the backward of each call takes: for the gradients of its inputs, and for those of its weights.
    The unit is the time of its forward.

    Each of them takes as long as the forward. A module that trains a part of its parameters, such as an adapter,
    computes the gradients of this part alone. One without parameters computes all in the gradients of its inputs.
    """
    requires: dict[fx.Node, bool] = {}
    found: list[tuple[float, float]] = []
    for node in traced.graph.nodes:
        call = traced.calls.get(node)
        with_gradients = _has_backward(node)
        of_inputs = with_gradients and any(requires[each] for each in node.all_input_nodes)
        if node.op == "get_attr":
            requires[node] = bool(node.meta["is_parameter"]) and model.get_parameter(str(node.target)).requires_grad
        elif call is None:
            requires[node] = of_inputs
        else:
            share = _trained(call)
            of_weights = 0.0 if share is None or not with_gradients else share
            found.append((float(of_inputs) * (2.0 if share is None else 1.0), of_weights))
            requires[node] = of_inputs or of_weights > 0
    return found


def used_with_gradients(traced: Traced, outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that may have gradients: the outputs depend on them, and not only through what runs without
    gradients. What changes something in place counts as an output.
    """
    found = set(outputs)
    for node in reversed(traced.graph.nodes):
        used = node in found or (node.op == "call_function" and has_effects(node, traced.calls.get(node)))
        if used and _has_backward(node):
            found.update(node.all_input_nodes)
    return found


def _has_backward(node: fx.Node) -> bool:
    if node.target in _WITHOUT_GRADIENTS:
        return False
    return modes_of(node).gradients is not False or _may_return_an_input(node)


def _may_return_an_input(node: fx.Node) -> bool:
    """True if a node may return one of its inputs itself, such as ``x.float()``: then that keeps its gradients."""
    if node.target is WHOLE_MODULE:
        return bool(node.meta["call"].shared)
    found = [memory_of(each) for each in tree_flatten(node.meta.get("val"))[0] if isinstance(each, Tensor)]
    given = [each.meta.get("val") for each in node.all_input_nodes]
    shared = {memory_of(each) for each in tree_flatten(given)[0] if isinstance(each, Tensor)}
    return not shared.isdisjoint(found) or "dropout" in str(node.target)  # whose fake results have their own memory


def _trained(call: Call) -> float | None:
    """Return which share of the parameters of a module is trained; None if it has none."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in call.module.parameters()]
    total = sum(size for size, _ in sizes)
    return sum(size for size, trained in sizes if trained) / total if total else None
