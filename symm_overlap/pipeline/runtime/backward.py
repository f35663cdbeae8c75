"""The backward pass of a graph, whole or in two parts: gradients of the inputs first, those of the parameters later.

See graph.py for how a graph is divided. The parameters are found in the graph and not in the module, because with FSDP
the module has other parameters by the time of the backward pass.

The input part runs the closure, and keeps the gradients that arrive at the boundary nodes. The weight part first runs
each boundary node alone, for the gradients of its frontier edges. Then it runs one backward pass from all of these
edges at once. So every gradient enters once, even if one boundary node leads to another. Hooks on a parameter, also
those after accumulation, are called once, with the whole gradient of the microbatch.

A hook on an intermediate value (``Tensor.register_hook``) may be called in both parts. In the weight part, it gets
zeros, so its result counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ._torch import PythonNode
from .graph import saved_tensors, split

Given = tuple[GradientEdge, Tensor]
Arrived = tuple[Tensor | None, ...]


def given_gradients(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Given]:
    """Return the edges at which the gradients of outputs enter the graph, with these gradients.

    Outputs that have no gradient, or that do not require one, are left out.
    """
    pairs = zip(outputs, gradients, strict=True)
    return [(get_gradient_edge(output), grad) for output, grad in pairs if output.requires_grad and grad is not None]


def backward(given: Sequence[Given]) -> None:
    """Run the whole backward pass: add the gradients of the inputs and the parameters to their ``.grad``."""
    if given:
        _run(given)


class WeightPart:
    """The second part of a backward pass, which is still to be run.

    Args:
        captured: for each boundary node: the node, the gradients that arrived there, and its frontier edges.
        given: the edges at which the weight part starts with gradients that are known already.
        roots: the edges at which gradients entered the whole graph.
    """

    def __init__(
        self,
        captured: list[tuple[Node, Arrived, list[GradientEdge]]],
        given: list[Given],
        roots: Sequence[GradientEdge] = (),
    ) -> None:
        self._captured = captured
        self._given = given
        # In torch 2.11, a Python reference to a node that is written in Python does not keep the node alive. Its
        # parents in the graph do, so the roots are kept.
        self._roots = roots

    def run(self) -> None:
        """Add the gradients of the parameters to their ``.grad``. Call it once."""
        given, self._given = self._given, []
        captured, self._captured = self._captured, []
        while captured:  # popped one by one, so that the tensors that a node has saved are freed once it has run
            given += _gradients_of(*captured.pop())
        if given:
            _run(given)
        self._roots = ()


def backward_input(given: list[Given], inputs: Sequence[Tensor]) -> WeightPart:
    """Add the gradients of ``inputs`` to their ``.grad``, and return the part that computes those of the parameters.

    Args:
        given: the result of `given_gradients`.
        inputs: leaf tensors that require a gradient.
    """
    if not inputs or not given:
        return WeightPart([], given)
    divided = split([edge for edge, _ in given], inputs)
    if divided is None:
        backward(given)
        return WeightPart([], [])
    arrived: dict[Node, Arrived] = {}
    roots = [edge for edge, _ in given]
    with ExitStack() as hooks:
        for node, edges in divided.boundary.items():
            _ask(node, edges, False)
            hooks.callback(node.register_prehook(partial(arrived.__setitem__, node)).remove)
        _run(given, retain_graph=bool(divided.boundary), inputs=[*inputs, *divided.together])
    if divided.boundary:  # otherwise retain_graph was False, and nothing was kept
        for node in divided.passed:
            _free(node)
    captured = [(node, arrived[node], edges) for node, edges in divided.boundary.items() if node in arrived]
    return WeightPart(captured, [given[index] for index in divided.outside], roots)


def _gradients_of(node: Node, arrived: Arrived, frontier: list[GradientEdge]) -> list[Given]:
    """Run one boundary node, for its frontier edges only."""
    roots = [(GradientEdge(node, number), grad) for number, grad in enumerate(arrived) if grad is not None]
    if not roots:
        return []
    edges, grads = zip(*roots, strict=True)
    _ask(node, frontier, True)
    # In the input part, hooks on the value, and `retain_grad`, have seen the arrived gradients. Now they see zeros.
    handle = node.register_prehook(lambda _: arrived)
    found = torch.autograd.grad(edges, frontier, [_zeros_like(grad) for grad in grads], allow_unused=True)
    handle.remove()
    return [(edge, grad) for edge, grad in zip(frontier, found, strict=True) if grad is not None]


def _zeros_like(grad: Tensor) -> Tensor:
    if type(grad) is not Tensor or grad.layout is not torch.strided:
        return torch.zeros_like(grad)
    return _zero(grad.dtype, grad.device).expand_as(grad)


@cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _ask(node: Node, edges: list[GradientEdge], wanted: bool) -> None:
    """Have a node that is written in Python compute only the gradients of these edges, or only those of all others.

    For other nodes, the engine of autograd does that.
    """
    if not isinstance(node, PythonNode):
        return
    chosen = {(edge.node, edge.output_nr) for edge in edges}
    needed = iter([(edge in chosen) is wanted for edge in node.next_functions if edge[0] is not None])
    # There is one entry for each argument. The arguments that require a gradient correspond to the edges, in order.
    node.needs_input_grad = tuple(next(needed) if argument else False for argument in _required(node))


def _required(node: Any) -> tuple[bool, ...]:
    """Return which arguments of a Python node require a gradient: ``needs_input_grad`` before `_ask` changed it."""
    if not hasattr(node, "_required_gradients"):
        node._required_gradients = node.needs_input_grad
    required: tuple[bool, ...] = node._required_gradients
    return required


def _free(node: Node) -> None:
    """Free the tensors that a node has saved, which no part of the backward pass will need."""
    for saved in saved_tensors(node):
        # Numbers are saved as 0-dimensional tensors. They take little memory, and not every dispatch mode can detach
        # them.
        if saved.unpack_hook is None and saved.data is not None and saved.data.dim():
            saved.register_hooks(_nothing, _refuse)


def _nothing(_: Tensor) -> None:
    return None


def _refuse(_: None) -> Tensor:
    raise RuntimeError(
        "the backward pass of this microbatch has run already, and its saved tensors are freed: do not call backward "
        "later on a value that was kept from the stage's module"
    )


def _run(given: Sequence[Given], retain_graph: bool = False, inputs: list[Tensor] | None = None) -> None:
    edges, grads = zip(*given, strict=True)
    torch.autograd.backward(edges, grads, retain_graph=retain_graph, inputs=inputs)
