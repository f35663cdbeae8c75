"""Tensors that are trimmed, padded or put into another order between a matmul and a collective.

No op can follow this. DTensor does it if the ranks cannot share a dimension evenly: it pads every rank's part to the
same size, and trims the whole.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from .._torch import known
from ..graph import aten, is_tensor, step_of, value
from ..matmul import matmul_of
from .gathered import Gathered

_TRIMS = (
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    operator.getitem,
    torch.ops.prims.rev.default,
    aten.constant_pad_nd.default,
    aten.cat.default,
)

_TRIMMED = "trimmed, padded or put into another order"
_UNEVEN = "as by DTensor if the ranks cannot share a dimension evenly"


def why_trimmed_after(graph: Graph, gathered: Gathered) -> str:
    """Return why no matmul of the trimmed gathered tensor can be fused; empty if there is none, or if it multiplies
    no more than half of the tensor. There is little to overlap then.
    """
    if gathered.shard.target is aten.cat.default:  # a bucket, whose parts are other tensors
        return ""
    made = {*gathered.nodes, *gathered.lost}
    for node in graph.nodes:
        matmul = matmul_of(node)
        if matmul is not None and matmul.left in made and _is_most(matmul.left, gathered.node):
            return f"the gathered tensor is {_TRIMMED} before it is multiplied, {_UNEVEN}"
        sources = _sources(node)
        if sources and made.issuperset(sources):
            made.add(node)
    return ""


def why_trimmed_before(node: Node) -> str:
    """Return why a reduction of a tensor that is made of a product alone cannot be fused; empty for other tensors, and
    if no more than half of the tensor comes from the product.
    """
    made, left = {node}, [node]
    while left:
        each = left.pop()
        if matmul_of(each) is None:
            sources = _sources(each)
            left += [source for source in sources if source not in made]
            made.update(sources)
            if not sources and not (is_tensor(each) and known(value(each).numel() == 0)):
                return ""
    products = [each for each in made if matmul_of(each) is not None]
    if len(products) != 1 or not _is_most(products[0], node):
        return ""
    return f"a product is {_TRIMMED} before it is reduced, {_UNEVEN}"


def _sources(node: Node) -> list[Node]:
    """Return the tensors that a node is made of by rearranging, trimming, padding or reordering."""
    step = step_of(node)
    if step is not None:
        return [step.source] if value(step.source).dtype == value(node).dtype else []
    if node.target not in _TRIMS:
        return []
    return [each for each in node.all_input_nodes if is_tensor(each) or each.target in _TRIMS]  # others are sizes


def _is_most(part: Node, whole: Node) -> bool:
    """True if a tensor is known to have more than half as many elements as another one."""
    return is_tensor(part) and known(2 * value(part).numel() > value(whole).numel())
