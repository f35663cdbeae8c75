"""What the split of a backward pass has to know of an autograd graph.

An example: ``y = gelu(x @ A) @ B``, with x the stage's input::

    MmBackward(2) ──> GeluBackward ──> MmBackward(1) ──> AccumulateGrad(x)
          └─> AccumulateGrad(B)              └─> AccumulateGrad(A)

The *closure* is every node on a path to an input: the upper row. A *boundary* node is one of the closure that has an
edge out of it: both MmBackward. Those edges are the *frontier*; below it are parameters and what is computed from
parameters alone. The input part of a backward pass runs the closure; the weight part runs the boundary nodes again,
for the gradients of their frontier edges only, and then what lies below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ._torch import PythonNode

# These compute the gradients of inputs and weights in one go and cannot leave out either.
_COMPUTES_ALL = ("MkldnnRnnLayerBackward", "CudnnRnnBackward", "MiopenRnnBackward")


@dataclass
class Split:
    """How the backward pass of a graph is divided.

    Attributes:
        together: parameters whose gradients cannot be separated from those of the inputs without computing something
            twice; the input part computes them.
        boundary: for each boundary node, its frontier edges that the weight part has to run.
        outside: by index, the roots that no input can be reached from, whose weight part starts at the root itself.
        passed: nodes of the closure that the weight part does not run again.
    """

    together: list[Tensor] = field(default_factory=list)
    boundary: dict[Node, list[GradientEdge]] = field(default_factory=dict)
    outside: list[int] = field(default_factory=list)
    passed: list[Node] = field(default_factory=list)


def split(roots: Sequence[GradientEdge], inputs: Iterable[Tensor]) -> Split:
    """Divide the graph behind ``roots`` into what the gradients of ``inputs`` need and the rest.

    Args:
        roots: where gradients of outputs enter the graph.
        inputs: leaf tensors that require a gradient.
    """
    sinks = {get_gradient_edge(tensor).node for tensor in inputs}
    order = _children_first([root.node for root in roots], sinks)
    closure = set(sinks)
    for node in order:
        if any(child in closure for child, _ in node.next_functions):
            closure.add(node)
    parents = Counter(child for node in order for child, _ in node.next_functions if child is not None)

    edges: list[tuple[Node | None, GradientEdge]] = []
    together: set[Node] = set()
    leaves = _Leaves()
    for node in order:
        if node not in closure:
            continue
        whole = not _can_be_split(node)
        for child, number in node.next_functions:
            if child is None or child in closure:
                continue
            edges.append((node, GradientEdge(child, number)))
            # With another way to the child, to run the node for this edge alone might run that way as well.
            if whole or parents[child] > 1:
                together |= leaves.below(child)
    edges += [(None, root) for root in roots if root.node not in closure]

    # All of a parameter's gradient is computed in one part, and so is all that comes through one edge.
    while shared := [edge for edge in edges if leaves.below(edge[1].node) & together]:
        edges = [edge for edge in edges if edge not in shared]
        together = together.union(*(leaves.below(edge.node) for _, edge in shared))

    found = Split(together=[leaf.variable for leaf in together])  # type: ignore[attr-defined]
    for parent, edge in edges:
        if parent is not None:
            found.boundary.setdefault(parent, []).append(edge)
    kept = {(edge.node, edge.output_nr) for parent, edge in edges if parent is None}
    found.outside = [index for index, root in enumerate(roots) if (root.node, root.output_nr) in kept]
    found.passed = [node for node in order if node in closure and node not in sinks and node not in found.boundary]
    return found


def _children_first(roots: Iterable[Node], sinks: set[Node]) -> list[Node]:
    """Every node that can be reached, each after all nodes that it leads to; nothing behind the sinks."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(node, False) for node in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        if node not in sinks:
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order


class _Leaves:
    """The nodes that accumulate gradients of parameters, below nodes outside the closure."""

    def __init__(self) -> None:
        self._below: dict[Node, frozenset[Node]] = {}

    def below(self, node: Node) -> frozenset[Node]:
        """Those that can be reached from a node."""
        for reached in _children_first([node], set(self._below)):
            if reached not in self._below:
                own = [reached] if hasattr(reached, "variable") else []
                children = (self._below[child] for child, _ in reached.next_functions if child is not None)
                self._below[reached] = frozenset(own).union(*children)
        return self._below[node]


def _can_be_split(node: Node) -> bool:
    """Whether a node can be run twice, each time for some of its edges, without computing anything twice."""
    return not isinstance(node, PythonNode) and not node.name().startswith(_COMPUTES_ALL)
