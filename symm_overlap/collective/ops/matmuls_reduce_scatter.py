"""``fused_matmuls_reduce_scatter``: scatter the sum of several products and of a tensor, in one exchange.

It is the gradient of an all-gather whose result had several readers: each weight contributes a product, and a caller
who used the gathered tensor itself contributes a gradient of it. `matmul_reduce_scatter` has the algorithm. Equivalent
to::

    reduce_scatter(sum(A @ B for A, B in zip(As, Bs)) + addend, reduce_op, scatter_dim, group)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._torch import resolve_group
from .arguments import check_divisible, check_reduce_op, check_tensors, dimension
from .call import Call, describe
from .library import define
from .matmul_reduce_scatter import check_product, product_of_rows, scatter_sum, scattered_shape


def _check(
    As: Sequence[Tensor], Bs: Sequence[Tensor], addend: Tensor | None, reduce_op: str, scatter_dim: int, world: int
) -> tuple[list[int], int]:
    if len(As) != len(Bs):
        raise ValueError(f"As has {len(As)} tensors and Bs has {len(Bs)}: each product needs both")
    if not As and addend is None:
        raise ValueError("As is empty and addend is None: there is nothing to sum")
    shapes = [check_product(A, B) for A, B in zip(As, Bs, strict=True)]
    if addend is not None:
        check_tensors([("addend", addend), *((f"As[{index}]", A) for index, A in enumerate(As))])
        shapes.append(list(addend.shape))
    for shape in shapes[1:]:
        if shape != shapes[0]:
            raise ValueError(f"products (and the addend) must have one shape: got {shapes}")
    check_reduce_op(reduce_op)
    scatter_dim = dimension("scatter_dim", scatter_dim, addend if addend is not None else As[0])
    check_divisible(scatter_dim, shapes[0], world)
    return shapes[0], scatter_dim


def _eager(
    As: Sequence[Tensor], Bs: Sequence[Tensor], addend: Tensor | None, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    group = resolve_group(group_name)
    shape, scatter_dim = _check(As, Bs, addend, reduce_op, scatter_dim, group.size())
    like = addend if addend is not None else As[0]
    k = sum(B.shape[0] for B in Bs)
    extra = () if addend is None else (addend,)
    arguments = f"({describe(*As, *Bs, *extra)}, {reduce_op}, {scatter_dim=})"
    rows = prod(scattered_shape(shape, scatter_dim, group.size())[:-1])
    op = "matmul_reduce_scatter" if As else "reduce_scatter"
    with Call(op, group, like, prod(shape[:-1]), shape[-1] if As else 0, k, rows, lambda: arguments) as call:
        return scatter_sum(call, As, Bs, addend, shape, scatter_dim, reduce_op == "avg")


def _fake(
    As: Sequence[Tensor], Bs: Sequence[Tensor], addend: Tensor | None, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    world = resolve_group(group_name).size()
    shape, scatter_dim = _check(As, Bs, addend, reduce_op, scatter_dim, world)
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
        grad = grad / resolve_group(ctx.group_name).size()
    ops = torch.ops.symm_overlap
    if not As:
        return [], [], ops.all_gather(grad, dim, ctx.group_name), None, None, None
    gathered, grad_As = ops.fused_all_gather_matmul(grad, [B.t() for B in Bs], dim, ctx.group_name)
    grad_Bs = [product_of_rows(A, gathered, dim) for A in As]
    return grad_As, grad_Bs, gathered if ctx.has_addend else None, None, None, None


define(
    "fused_matmuls_reduce_scatter",
    "(Tensor[] As, Tensor[] Bs, Tensor? addend, str reduce_op, int scatter_dim, str group_name) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    multiplies=True,
)
