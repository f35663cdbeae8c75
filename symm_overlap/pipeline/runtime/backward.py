"""The backward pass of a graph, whole or in two parts: gradients of the inputs first, those of the parameters later.

See graph.py for how a graph is divided. The parameters are found in the graph, not in a module, because with FSDP the
module has others by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .graph import split

Given = tuple[GradientEdge, Tensor]


def given_gradients(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Given]:
    """Where the gradients of outputs enter the graph; outputs without one, or that need none, are left out."""
    pairs = zip(outputs, gradients, strict=True)
    return [(get_gradient_edge(output), grad) for output, grad in pairs if output.requires_grad and grad is not None]


def backward(given: Sequence[Given]) -> None:
    """Both parts at once: gradients are added to ``.grad`` of the inputs and the parameters."""
    if given:
        _run(given)


class WeightPart:
    """What the second part of a backward pass still has to do."""

    def __init__(self) -> None:
        self._captured: list[tuple[Node, tuple[Tensor | None, ...], list[GradientEdge]]] = []
        self._given: list[Given] = []

    def run(self) -> None:
        """Add the gradients of the parameters to their ``.grad``. To be called once."""
        given, self._given = self._given, []
        captured, self._captured = self._captured, []
        for node, arrived, frontier in captured:
            given += _gradients_at(node, arrived, frontier)
        if given:
            _run(given)


def backward_input(given: Sequence[Given], inputs: Sequence[Tensor]) -> WeightPart:
    """Add the gradients of ``inputs`` to their ``.grad``, and return what remains to be done for the parameters.

    Args:
        given: from `given_gradients`.
        inputs: leaf tensors that require a gradient.
    """
    rest = WeightPart()
    if not inputs:
        rest._given = list(given)
        return rest
    divided = split([edge for edge, _ in given], inputs)
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}

    def capture(node: Node) -> Any:
        return node.register_prehook(lambda grads: arrived.__setitem__(node, grads))

    handles = [capture(node) for node in divided.boundary]
    try:
        if given:
            _run(given, retain_graph=True, inputs=[*inputs, *divided.together])
    finally:
        for handle in handles:
            handle.remove()
    rest._captured = [(node, arrived[node], edges) for node, edges in divided.boundary.items() if node in arrived]
    rest._given = [given[index] for index in divided.outside]
    return rest


def _gradients_at(node: Node, arrived: tuple[Tensor | None, ...], frontier: list[GradientEdge]) -> list[Given]:
    """Run one boundary node for some of its edges only."""
    roots = [(GradientEdge(node, number), grad) for number, grad in enumerate(arrived) if grad is not None]
    if not roots:
        return []
    edges, grads = zip(*roots, strict=True)
    found = torch.autograd.grad(edges, frontier, grads, allow_unused=True)
    return [(edge, grad) for edge, grad in zip(frontier, found, strict=True) if grad is not None]


def _run(given: Sequence[Given], retain_graph: bool = False, inputs: list[Tensor] | None = None) -> None:
    edges, grads = zip(*given, strict=True)
    torch.autograd.backward(edges, grads, retain_graph=retain_graph, inputs=inputs)
