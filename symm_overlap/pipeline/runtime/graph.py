"""Analyse an autograd graph, so that its backward pass can be split.

An example is ``y = gelu(x @ A) @ B``, where x is the stage's input::

    MmBackward(2) ──> GeluBackward ──> MmBackward(1) ──> AccumulateGrad(x)
          └─> AccumulateGrad(B)              └─> AccumulateGrad(A)

The *closure* consists of every node on a path to an input: the upper row. A *boundary* node is a node of the closure
that has an edge to a node outside the closure: both MmBackward nodes. These edges are the *frontier*. Below the
frontier are parameters, and values that are computed from parameters alone. The input part of a backward pass runs the
closure. The weight part runs the boundary nodes again, for the gradients of their frontier edges only, and then the
nodes below.

Nothing is computed twice. If a node cannot be divided without computing something twice, the input part runs it whole.
The parameters that it leads to get all of their gradient there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ._torch import PythonNode, donates_buffers, has_hooks, is_compiled, is_reentrant_checkpoint

IN_PARTS = "backward_in_parts"
"""A `torch.autograd.Function` sets this attribute on its context to declare three things: its backward pass may run
twice, computes only the gradients that ``ctx.needs_input_grad`` requests, and does not change what was saved."""

# C++ nodes that always compute the gradients of inputs and weights together.
_COMPUTES_ALL = ("MkldnnRnnLayerBackward", "CudnnRnnBackward", "MiopenRnnBackward")


@dataclass(frozen=True, eq=False)
class _Kind:
    """The properties that all nodes of one type share.

    Attributes:
        compiled: see `is_compiled`.
        reentrant: see `is_reentrant_checkpoint`.
        python: True if the nodes are written in Python.
        computes_all: True if a node computes every gradient whenever it runs.
        accumulates: True if a node adds to the gradient of a parameter.
        saved: the names of the attributes in which nodes store what they saved.
    """

    compiled: bool
    reentrant: bool
    python: bool
    computes_all: bool
    accumulates: bool
    saved: tuple[str, ...]


@cache
def _kind_of(kind: type) -> _Kind:
    return _Kind(
        is_compiled(kind),
        is_reentrant_checkpoint(kind),
        issubclass(kind, PythonNode),
        kind.__name__.startswith(_COMPUTES_ALL),
        hasattr(kind, "variable"),
        tuple(name for name in dir(kind) if name.startswith("_raw_saved_")),
    )


@dataclass
class Split:
    """How the backward pass of a graph is divided.

    Attributes:
        together: parameters whose gradients the input part computes.
        boundary: for each boundary node, those of its frontier edges that the weight part has to run.
        outside: the indices of the roots from which no input can be reached. The weight part starts there too.
        passed: the nodes of the closure that the weight part does not run again.
    """

    together: list[Tensor]
    boundary: dict[Node, list[GradientEdge]] = field(default_factory=dict)
    outside: list[int] = field(default_factory=list)
    passed: list[Node] = field(default_factory=list)


def split(roots: Sequence[GradientEdge], inputs: Iterable[Tensor]) -> Split | None:
    """Divide the graph behind ``roots`` into what the gradients of ``inputs`` need, and the rest.

    Args:
        roots: the edges at which gradients of outputs enter the graph.
        inputs: leaf tensors that require a gradient.

    Returns:
        How the graph is divided, or None if it has a node that can only run in a whole backward pass.
    """
    graph = _Graph([root.node for root in roots], {get_gradient_edge(tensor).node for tensor in inputs})
    kinds = [_kind_of(kind) for kind in {type(node) for node in graph.children}]
    if any(kind.reentrant for kind in kinds) or (donates_buffers() and any(kind.compiled for kind in kinds)):
        return None
    frontier = [*graph.frontier(), *((None, root) for root in roots if root.node not in graph.closure)]
    together: frozenset[Node] = frozenset()
    for parent, edge in frontier:
        if parent is not None and not graph.can_leave_out(parent, edge.node):
            together |= graph.leaves[edge.node]
    # Everything below one edge, and all of one parameter's gradient, must be computed in the same part.
    size = -1
    while size != len(together):
        size = len(together)
        together = together.union(*(below for _, edge in frontier if (below := graph.leaves[edge.node]) & together))

    found = Split(together=[leaf.variable for leaf in together])  # type: ignore[attr-defined]
    for parent, edge in frontier:
        if parent is not None and not graph.leaves[edge.node] & together:
            found.boundary.setdefault(parent, []).append(edge)
    for index, root in enumerate(roots):
        if root.node not in graph.closure and not graph.leaves[root.node] & together:
            found.outside.append(index)
    found.passed = [node for node in graph.closure if node in graph.children and node not in found.boundary]
    return found


def saved_tensors(node: Node) -> Iterator[Any]:
    """Yield what a node has saved, as torch's saved-tensor objects. Torch documents these for hooks on them."""
    for name in _kind_of(type(node)).saved:
        value = getattr(node, name)
        yield from (value if isinstance(value, (tuple, list)) else [value])


class _Graph:
    """The nodes behind some roots.

    Attributes:
        children: for every node that can be reached, except the sinks, the edges that lead from it.
        closure: the nodes from which a sink can be reached, and the sinks themselves.
        leaves: for every node outside the closure, the nodes at or below it that accumulate gradients of parameters.
        parents: for every node, the number of edges that lead to it.
    """

    def __init__(self, roots: Iterable[Node], sinks: set[Node]) -> None:
        self.children: dict[Node, list[GradientEdge]] = {}
        self.closure = sinks
        self.leaves: dict[Node, frozenset[Node]] = {}
        self._holds: dict[Node, bool] = {}  # True if unpacking what was saved at a node, or below it, calls hooks
        stack = [(node, False) for node in roots]
        while stack:
            node, done = stack.pop()
            if done:
                self._finish(node)
            elif node not in self.children and node not in sinks:
                self.children[node] = [GradientEdge(child, number) for child, number in node.next_functions if child]
                stack.append((node, True))
                stack += [(edge.node, False) for edge in self.children[node]]
        self.parents = Counter(edge.node for edges in self.children.values() for edge in edges)

    def _finish(self, node: Node) -> None:
        """Add a node to the closure or to the leaves. All nodes that it leads to were added before."""
        edges, kind = self.children[node], _kind_of(type(node))
        if any(edge.node in self.closure for edge in edges):
            self.closure.add(node)
            return
        own = frozenset([node]) if kind.accumulates else frozenset()
        self.leaves[node] = own.union(*(self.leaves[edge.node] for edge in edges))
        self._holds[node] = _unpacks(node) or any(self._holds[edge.node] for edge in edges)

    def frontier(self) -> list[tuple[Node, GradientEdge]]:
        """Return the edges that lead out of the closure, with the nodes that they come from."""
        pairs = ((node, edge) for node, edges in self.children.items() if node in self.closure for edge in edges)
        return [(node, edge) for node, edge in pairs if edge.node not in self.closure]

    def can_leave_out(self, parent: Node, child: Node) -> bool:
        """True if an edge out of the closure can be left to the weight part without computing anything twice."""
        # If another edge leads to the child too, running the parent for this edge alone might run the other edge too.
        if self.parents[child] > 1 or self._holds[child]:
            return False
        # The weight part stops at the child and later starts from it again. Hooks would be called both times.
        if isinstance(variable := getattr(child, "variable", None), Tensor) and has_hooks(variable):
            return False
        kind = _kind_of(type(parent))
        if kind.computes_all or (kind.python and not getattr(parent, IN_PARTS, False)):
            return False
        return not _unpacks(parent)


def _unpacks(node: Node) -> bool:
    """True if hooks are called when a node unpacks what it saved.

    The hooks of activation checkpointing then recompute a block, anew in every backward pass. Other hooks copy.
    """
    return any(saved.unpack_hook is not None for saved in saved_tensors(node))
