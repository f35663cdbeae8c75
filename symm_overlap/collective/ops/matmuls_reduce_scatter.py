"""``fused_matmuls_reduce_scatter``: scatter the sum of several products and a tensor, in one exchange.

This is the gradient of an all-gather whose result is used several times: each weight contributes a product, and a
caller that used the gathered tensor itself contributes its gradient. `matmul_reduce_scatter` describes the algorithm.
Equivalent to::

    reduce_scatter(sum(A @ B for A, B in zip(As, Bs)) + addend, reduce_op, scatter_dim, group)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import (
    TensorLike,
    dimension,
    remembered,
    require_divisible,
    require_reduce_op,
    require_tensors,
)
from ..exchange import Peers
from ..registration import define, size_of_group
from .matmul_reduce_scatter import Scattered, describe_scatter, product_shape, scatter_sum, scattered_shape
from .product import product_of_rows


def require_sum(
    As: Sequence[TensorLike],
    Bs: Sequence[TensorLike],
    addend: TensorLike | None,
    reduce_op: str,
    scatter_dim: int,
    world: int,
) -> tuple[list[int], int]:
    """Return the shape of every product, and the dimension. Raises ValueError or TypeError if there is no such sum."""
    if len(As) != len(Bs):
        raise ValueError(f"As has {len(As)} tensors and Bs has {len(Bs)}: each product needs both")
    if not As and addend is None:
        raise ValueError("As is empty and addend is None: there is nothing to sum")
    shapes = [product_shape(A, B) for A, B in zip(As, Bs, strict=True)]
    if addend is not None:
        require_tensors([("addend", addend), *((f"As[{index}]", A) for index, A in enumerate(As))])
        shapes.append(list(addend.shape))
    for shape in shapes[1:]:
        if shape != shapes[0]:
            raise ValueError(f"products (and the addend) must have one shape: got {shapes}")
    require_reduce_op(reduce_op)
    scatter_dim = dimension("scatter_dim", scatter_dim, addend if addend is not None else As[0])
    require_divisible(scatter_dim, shapes[0], world)
    return shapes[0], scatter_dim


@remembered
def _described(
    As: Sequence[Tensor], Bs: Sequence[Tensor], addend: Tensor | None, reduce_op: str, scatter_dim: int, world: int
) -> Scattered:
    shape, scatter_dim = require_sum(As, Bs, addend, reduce_op, scatter_dim, world)
    op = "matmul_reduce_scatter" if As else "reduce_scatter"
    return describe_scatter(op, As, Bs, addend, shape, reduce_op, scatter_dim, world)


def _eager(
    peers: Peers, As: Sequence[Tensor], Bs: Sequence[Tensor], addend: Tensor | None, reduce_op: str, scatter_dim: int
) -> Tensor:
    scattered = _described(As, Bs, addend, reduce_op, scatter_dim, peers.world)
    return scatter_sum(peers, scattered, As, Bs, addend)


def _fake(
    world: int, As: Sequence[Tensor], Bs: Sequence[Tensor], addend: Tensor | None, reduce_op: str, scatter_dim: int
) -> Tensor:
    shape, scatter_dim = require_sum(As, Bs, addend, reduce_op, scatter_dim, world)
    return (addend if addend is not None else As[0]).new_empty(scattered_shape(shape, scatter_dim, world))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    As, Bs, addend, ctx.reduce_op, ctx.scatter_dim, ctx.group_name = inputs
    ctx.products = len(As)
    ctx.has_addend = addend is not None
    ctx.save_for_backward(*As, *Bs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    As, Bs = ctx.saved_tensors[: ctx.products], ctx.saved_tensors[ctx.products :]
    dim = ctx.scatter_dim % grad.dim()
    if ctx.reduce_op == "avg":
        grad = grad / size_of_group(ctx.group_name)
    ops = torch.ops.symm_overlap
    if not As:
        return [], [], ops.all_gather(grad, dim, ctx.group_name), None, None, None
    gathered, grad_As = ops.fused_all_gather_matmul(grad, [B.t() for B in Bs], dim, ctx.group_name)
    grad_Bs = [product_of_rows(A, gathered, dim) for A in As]
    return grad_As, grad_Bs, gathered if ctx.has_addend else None, None, None, None


def _flop(As: Any, Bs: Any, *_: Any, **__: Any) -> int:
    """Return 2 * rows * columns * contracted size, summed over the products."""
    return sum(2 * prod(A) * int(B[1]) for A, B in zip(As, Bs, strict=True))


define(
    "fused_matmuls_reduce_scatter",
    "(Tensor[] As, Tensor[] Bs, Tensor? addend, str reduce_op, int scatter_dim, str group_name) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    multiplies=True,
    flop=_flop,
)
