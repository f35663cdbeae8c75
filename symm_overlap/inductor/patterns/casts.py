"""Nodes that change nothing but the dtype, between matmuls and collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...collective.sum_dtypes import HALVES
from ..graph import aten, is_tensor, step_of, value
from ..matmul import matmul_of

_DTYPES = (*HALVES, torch.float32, torch.float64)


def is_cast(node: Any) -> bool:
    """True if a node changes nothing but the dtype, from one kind of float to another."""
    if not is_tensor(node) or node.op != "call_function":
        return False
    plain = node.target is torch.ops.prims.convert_element_type.default
    if node.target is aten._to_copy.default:
        kept = {"device": value(node.args[0]).device, "memory_format": torch.preserve_format}
        plain = all(given in (None, kept.get(name)) for name, given in node.kwargs.items() if name != "dtype")
    return plain and value(node).dtype in _DTYPES and value(node.args[0]).dtype in _DTYPES


def is_widening(node: Any) -> bool:
    """True if a node is a cast from half precision to float32. An op can do it: no bit depends on when it is done."""
    return is_cast(node) and value(node).dtype == torch.float32 and value(node.args[0]).dtype in HALVES


def why_cast(node: Node) -> str:
    """Return why a product, or a sum with one, that is cast before it is reduced cannot be fused; empty for others."""
    if not is_cast(node) or not has_product(node, ()):
        return ""
    if is_widening(node):
        why = "it or its cast is used elsewhere too, or its bias differs between rows"
        return f"a product is cast before it is reduced, and {why}"
    dtype, own = value(node).dtype, value(node.args[0]).dtype  # type: ignore[arg-type]
    return (
        f"a product is cast to {dtype} before it is reduced, and the op returns sums of {own}: multiply {dtype}, or "
        f"reduce {own} and cast afterwards"
    )


def has_product(node: Node, scalings: tuple[Any, ...]) -> bool:
    """True if a node is computed from a matmul by rearranging, adding, casting and ``scalings`` alone."""
    seen, left = {node}, [node]
    while left:
        each = left.pop()
        if matmul_of(each) is not None:
            return True
        step = step_of(each)
        if step is not None:
            sources = [step.source]
        elif is_cast(each) or each.target in (*scalings, aten.add.Tensor):
            sources = each.all_input_nodes
        else:
            continue
        left += [source for source in sources if source not in seen]
        seen.update(sources)
    return False
