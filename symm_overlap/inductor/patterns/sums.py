"""Sums whose terms an op can add: tensors of one shape and dtype."""

from __future__ import annotations

from torch.fx import Node

from ..graph import aten, is_tensor, same_shape, value
from .casts import has_product


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
