"""Add nodes to a graph of torch.compile, with their fake tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cmp_to_key, partial, reduce
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ._torch import FORCE_STRIDES, arithmetic, expression_of, known, plain_size, tree_leaves
from .arrangement import Size
from .graph import aten, is_tensor, may_view, same_strides, value

_COLLECTIVES = ("_c10d_functional", "symm_overlap")
"""The namespaces of the ops that the pass replaces, and of those that it writes."""


def _read_by_strides(node: Node) -> bool:
    """True if ``as_strided`` reads the memory of a tensor, also through a view of it."""
    left, seen = [node], {node}
    while left:
        each = left.pop()
        for user in each.users:
            if user.target is aten.as_strided.default:
                return True
            if user not in seen and may_view(user, each):
                seen.add(user)
                left.append(user)
    return False


def _is_size(found: object, expression: Any) -> bool:
    return isinstance(found, torch.SymInt) and bool(expression_of(found) == expression)


def _order_in_memory(tensor: Tensor) -> list[int] | None:
    """Return the dimensions of a tensor from the outermost one in memory to the innermost one. Return None if there are
    gaps between the elements, or if that is not known.
    """

    def from_the_outside(one: int, other: int) -> int:
        return -1 if known(tensor.stride(one) > tensor.stride(other)) else 1

    order = list(range(tensor.dim()))
    if not tensor.is_contiguous():
        order.sort(key=cmp_to_key(from_the_outside))
    return order if tensor.permute(order).is_contiguous() else None


def _is_symbolic(tensor: Tensor) -> bool:
    return not all(isinstance(plain_size(size), int) for size in (*tensor.shape, *tensor.stride()))


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


class SymbolicSizeError(Exception):
    """Raised if a size cannot be computed from those of the graph."""


def add_values(graph: Graph) -> None:
    """Give fake tensors to nodes without a value, which another pass has added, if those of their inputs are known."""
    for node in graph.nodes:
        known_inputs = all("val" in each.meta for each in node.all_input_nodes)
        if node.op == "call_function" and "val" not in node.meta and known_inputs:
            _add_value(node)


def _add_value(node: Node) -> None:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    tensors = [each.meta["val"] for each in node.all_input_nodes if is_tensor(each)]
    mode = getattr(tensors[0], "fake_mode", None) if tensors else None
    with mode or nullcontext():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


class Writer:
    """Adds nodes, with their fake tensors, before a given node of a graph."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self.graph, self.before = graph, before
        self.written: list[Node] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Add a call of an op, or of ``operator.getitem``."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        self.written.append(node)
        _add_value(node)
        if "stack_trace" in self.before.meta:
            node.meta["stack_trace"] = self.before.meta["stack_trace"]
        return node

    def op(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """Add a call of an op of this package, with an empty note.

        Raises TypeError if no op takes tensors of such a dtype. The op would say so too, but torch would log its error.
        """
        for each in tree_leaves((args, kwargs)):
            if is_tensor(each) and not value(each).is_floating_point():
                raise TypeError(f"a tensor is {value(each).dtype}, and the ops multiply and add only floating numbers")
        return self.call(getattr(torch.ops.symm_overlap, name).compiled, *args, **kwargs, note="")

    def reshape(self, node: Node, shape: Sequence[Size]) -> Node:
        """Return ``node.reshape(shape)``, or the node itself if it has this shape."""
        old, shape = value(node).shape, [plain_size(size) for size in shape]
        if len(old) == len(shape) and all(known(a == b) for a, b in zip(old, shape, strict=True)):
            return node
        symbolic = [size for size in shape if not isinstance(size, int)]
        if len(symbolic) == 1 and not any(known(size == 0) for size in shape if isinstance(size, int)):
            return self.call(aten.reshape.default, node, [size if isinstance(size, int) else -1 for size in shape])
        return self.call(aten.reshape.default, node, self._sizes(shape))

    def of_dtype(self, node: Node, dtype: torch.dtype) -> Node:
        """Return ``node`` viewed as another dtype of the same size."""
        return node if value(node).dtype == dtype else self.call(aten.view.dtype, node, dtype)

    def like(self, node: Node, old: Node) -> Node:
        """Return ``node`` with the dtype and shape of ``old``. If there are no gaps between the elements of ``old`` in
        memory, the result also has its strides, because other nodes may depend on them.

        Raises ValueError if other nodes depend on other strides of ``old``.
        """
        made, node = node, self.reshape(self.of_dtype(node, value(old).dtype), list(value(old).shape))
        order = _order_in_memory(value(old))
        if order is not None and not value(node).permute(order).is_contiguous():
            node = self._in_order(node, order)
        if order is not None and _is_symbolic(value(old)) and not _share_memory(value(made), value(node)):
            # Inductor may leave this copy out, and save views of what it copies for the backward pass. If sizes are
            # symbolic, torch takes the strides of the first call for constants, unless they are those of the graph.
            node = self.call(FORCE_STRIDES, node, self._strides(node, order))
        if not same_strides(value(node), value(old)) and _read_by_strides(old):
            raise ValueError("as_strided reads what it computes, and the strides differ")
        return node

    def _in_order(self, node: Node, order: list[int]) -> Node:
        """Return a copy of ``node`` with its dimensions in this order in memory, the outermost one first."""
        if order == sorted(order):
            return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        rows = self.call(aten.permute.default, node, order)
        rows = self.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
        return self.call(aten.permute.default, rows, [order.index(dim) for dim in range(len(order))])

    def _strides(self, node: Node, order: list[int]) -> list[Any]:
        """Return the strides, as arguments for a node, of a tensor like ``node`` without gaps, whose dimensions are in
        this order in memory."""
        strides: dict[int, Any] = {order[-1]: 1}
        for outer, inner in reversed(list(pairwise(order))):
            stride, size = strides[inner], self.size(node, inner)
            are_numbers = isinstance(stride, int) and isinstance(size, int)
            strides[outer] = stride * size if are_numbers else self.call(operator.mul, stride, size)
        return [strides[dim] for dim in range(len(order))]

    def size(self, node: Node, dim: int) -> Any:
        """Return ``node.shape[dim]`` as an argument for a node."""
        (size,) = self._sizes([plain_size(value(node).shape[dim])])
        return size

    def _sizes(self, shape: Sequence[Size]) -> list[Any]:
        """Return sizes as arguments for a node: for symbolic sizes, the nodes whose values they are."""
        return [size if isinstance(size, int) else self._node_of(size) for size in shape]

    def _node_of(self, size: torch.SymInt) -> Node:
        for node in self._earlier():
            if isinstance(found := node.meta.get("val"), torch.SymInt) and known(found == size):
                return node
        computed = self._computed(expression_of(size))
        assert isinstance(computed, Node)
        return computed

    def _computed(self, expression: Any) -> Node | int:
        """Return a node whose value is an expression of sizes, or a number. Add the nodes that compute it."""
        if expression.is_Integer:
            return int(expression)
        for node in self._earlier(depends_on_data=expression.is_Symbol):
            if _is_size(node.meta.get("val"), expression):
                return node
            for dim, size in enumerate(value(node).shape if is_tensor(node) else ()):
                if _is_size(size, expression):
                    return self.call(aten.sym_size.int, node, dim)
        if (found := arithmetic(expression)) is None:
            raise SymbolicSizeError(f"size {expression} cannot be computed from those of the graph")
        calculate, operands = found
        return reduce(partial(self.call, calculate), map(self._computed, operands))

    def _earlier(self, depends_on_data: bool = False) -> Iterator[Node]:
        """Yield the nodes before those that are written, of which sizes may be taken.

        These are the inputs of the graph, and what is computed from sizes of these alone. If the size may depend on
        data, they are also all nodes that no collective contributes to. The size of another tensor may be that of one
        which is about to be replaced by what is written.
        """
        found: set[Node] = set()
        for node in takewhile(lambda node: node is not self.before, self.graph.nodes):
            is_size = depends_on_data or isinstance(node.meta.get("val"), torch.SymInt)
            own = is_size and getattr(node.target, "namespace", "") not in _COLLECTIVES
            if node.op == "placeholder" or (own and found.issuperset(node.all_input_nodes)):
                found.add(node)
                yield node

    def undo(self) -> None:
        """Remove all nodes that were added."""
        for node in reversed(self.written):
            self.graph.erase_node(node)
        self.written.clear()
