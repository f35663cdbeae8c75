"""Sums whose terms an op can add: tensors of one shape and dtype."""

from __future__ import annotations

from torch.fx import Node

from ..graph import aten, value
from .casts import has_product


def is_plain_sum(node: Node) -> bool:
    """True if the node adds two tensors of one shape and dtype."""
    operands = node.args[:2]
    if node.kwargs.get("alpha", 1) != 1 or not all(isinstance(operand, Node) for operand in operands):
        return False
    values = [value(operand) for operand in (node, *operands)]  # type: ignore[arg-type]
    return all(one.shape == values[0].shape and one.dtype == values[0].dtype for one in values)


def why_uneven(node: Node) -> str:
    """Return why a sum with a product is not one that an op can add; empty for other nodes."""
    if node.target is not aten.add.Tensor or is_plain_sum(node) or not has_product(node, ()):
        return ""
    return (
        "something of another shape or dtype is added to a product before it is reduced, or alpha times something: "
        "add a bias with addmm or linear, and expand other tensors to the shape of the product"
    )
