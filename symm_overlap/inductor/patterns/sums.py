"""Sums whose terms an op can add: tensors of one shape and dtype."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from ..graph import aten, is_tensor, same_shape, same_strides, value
from .casts import has_product
from .pattern import is_unwritten


def drop_zeros(graph: Graph) -> None:
    """Replace ``0 + x`` by ``x`` where it is only added to something else. Python's ``sum`` begins with 0."""
    for node in list(graph.nodes):
        if _adds_zero(node) and node.users and all(user.target is aten.add.Tensor for user in node.users):
            tensor: Any = node.args[0]
            if not is_unwritten([tensor]):  # the sum holds what was in the tensor before
                continue
            node.replace_all_uses_with(tensor)
            graph.erase_node(node)


def _adds_zero(node: Node) -> bool:
    if node.target is not aten.add.Tensor or len(node.args) != 2 or not all(map(is_tensor, (node, node.args[0]))):
        return False
    tensor, other = node.args
    if not isinstance(other, (int, float)) or other != 0:
        return False
    old, new = value(tensor), value(node)  # type: ignore[arg-type]
    return old.dtype == new.dtype and same_strides(old, new)


def is_plain_sum(node: Node) -> bool:
    """True if the node adds two tensors of one shape and dtype."""
    operands = node.args[:2]
    if node.kwargs.get("alpha", 1) != 1 or not all(map(is_tensor, operands)):
        return False
    return all(
        same_shape(operand, node) and value(operand).dtype == value(node).dtype  # type: ignore[arg-type]
        for operand in operands
    )


def why_uneven(node: Node) -> str:
    """Return why a sum with a product is not one that an op can add; empty for other nodes."""
    if node.target is not aten.add.Tensor or is_plain_sum(node) or not has_product(node, ()):
        return ""
    return (
        "something of another shape or dtype is added to a product before it is reduced, or alpha times something: "
        "add a bias with addmm or linear, and expand other tensors to the shape of the product"
    )


def why_part(node: Node) -> str:
    """Return why a sum with a product that is a term of another sum stays as it is; empty for other nodes."""
    if node.target is not aten.add.Tensor or not is_plain_sum(node) or not has_product(node, ()):
        return ""
    return "something else uses a sum with a product, to which more is added before it is reduced"
