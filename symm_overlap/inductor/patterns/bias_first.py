"""Add a bias in the matmul, where it is added to the product before a reduction.

Torch computes ``linear`` of an input with three dimensions that is not contiguous, such as a slice, as a product, a
view of it, and a sum with the bias. Programs may also contain ``x @ w + bias``. The ops add a bias before they round
the product, as ``addmm`` does. Inductor does the same if there is no view in between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Graph, Node

from .._torch import known
from ..graph import VIEWS, aten, is_tensor, step_of, value
from ..matmul import matmul_of
from .all_reduce import AllReduce
from .casts import is_widening
from .pattern import SkipError, is_unwritten, writing
from .reduce_scatter import ReduceScatter

_WITH_BIAS: dict[Any, Any] = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}
_REDUCTIONS = (AllReduce.target, ReduceScatter.target)


class _Sum(NamedTuple):
    """A product, its views one after another, and the node that adds a bias to the last of them."""

    product: Node
    views: list[Node]
    bias: Node
    adder: Node


def bias_first(graph: Graph) -> None:
    """Replace products and the biases that are added to them by one matmul, before reductions."""
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or not all(map(is_tensor, (node, *node.args))):
            continue
        first, second = node.args
        found = _found(node, first, second) or _found(node, second, first)
        if found is None or not _is_reduced(node):
            continue
        if is_unwritten([found.product, *found.product.all_input_nodes, found.bias]):
            _replace(graph, found)


def _found(node: Node, tensor: Any, bias: Any) -> _Sum | None:
    """Return the sum if ``tensor`` is a product that nothing else uses, or a view of one, and ``bias`` fits to it."""
    views, product = list[Node](), tensor
    while product.target in VIEWS and set(product.users) == {views[0] if views else node}:
        views.insert(0, product)
        product = product.args[0]
    if product.target not in _WITH_BIAS or set(product.users) != {views[0] if views else node} or bias in views:
        return None
    each, row = (*views, product, bias), value(bias)
    if matmul_of(product) is None or row.dim() != 1 or any(value(one).dim() == 0 for one in each):
        return None
    fits = all(known(value(one).shape[-1] == row.shape[0]) and value(one).dtype == row.dtype for one in (*each, node))
    return _Sum(product, views, bias, node) if fits else None


def _is_reduced(node: Node) -> bool:
    """True if a collective reduces a tensor, perhaps rearranged, cast, or with something added to it."""
    left, seen = [node], {node}
    while left:
        for user in left.pop().users:
            if user.target in _REDUCTIONS:
                return True
            passed = step_of(user) is not None or user.target is aten.add.Tensor or is_widening(user)
            if passed and user not in seen:
                seen.add(user)
                left.append(user)
    return False


def _replace(graph: Graph, found: _Sum) -> None:
    try:
        with writing(graph, found.adder) as write:
            new: Any = write.call(_WITH_BIAS[found.product.target], found.bias, *found.product.args)
            for view in found.views:
                new = write.call(view.target, new, *view.args[1:])  # type: ignore[arg-type]
    except SkipError:
        return
    found.adder.replace_all_uses_with(new)
    for node in (found.adder, *reversed(found.views), found.product):
        graph.erase_node(node)
