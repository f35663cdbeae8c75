"""``fused_matmuls_reduce_scatter``: scatter the sum of several products and a tensor, in one exchange.

This is the gradient of an all-gather whose result is used several times: each weight contributes a product, and a
caller that used the gathered tensor itself contributes its gradient. `matmul_reduce_scatter` describes the algorithm.
Equivalent to::

    products = [(A @ B + bias).to(sum_dtype or A.dtype) for A, B, bias in zip(As, Bs, biases)]
    total = sum(products) + addend.to(sum_dtype or addend.dtype)
    reduce_scatter(total.to(out_dtype or total.dtype), reduce_op, scatter_dim, group)

Autocast makes such sums: products of half-precision factors are cast to float32, and then added and reduced. Whatever
can be in half precision is sent as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import (
    dimension,
    remembered,
    require_divisible,
    require_one_device,
    require_reduce_op,
    require_tensors,
)
from ..biases import Biases, gradients, one_each, require_biases
from ..dispatch.registration import define, size_of_group
from ..exchange import Peers
from ..sum_dtypes import SumDtypes, sum_dtypes
from . import flop
from .matmul_reduce_scatter import Scattered, describe_scatter, product_shape, scatter_sum, scattered_shape
from .product import product, product_of_rows


def require_summands(
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    biases: Biases,
    sum_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[list[int], SumDtypes]:
    """Return the shape of every product, and the dtypes.

    Raises:
        ValueError, TypeError: there is no such sum.
    """
    if len(As) != len(Bs):
        raise ValueError(f"As has {len(As)} tensors and Bs has {len(Bs)}: each product needs both")
    if not As and addend is None:
        raise ValueError("As is empty and addend is None: there is nothing to sum")
    shapes = [product_shape(A, B) for A, B in zip(As, Bs, strict=True)]
    require_tensors([(f"As[{index}]", A) for index, A in enumerate(As)] or [("addend", addend)])  # type: ignore[list-item]
    require_biases(("As[0]", As[0] if As else addend), [(f"Bs[{index}]", B) for index, B in enumerate(Bs)], biases)  # type: ignore[arg-type]
    dtypes = sum_dtypes((As[0] if As else addend).dtype, len(As), addend, sum_dtype, out_dtype)  # type: ignore[union-attr]
    if addend is not None:
        require_one_device([("addend", addend), *((f"As[{index}]", A) for index, A in enumerate(As))])
        shapes.append(list(addend.shape))
    for shape in shapes[1:]:
        if shape != shapes[0]:
            raise ValueError(f"products (and the addend) must have one shape: got {shapes}")
    return shapes[0], dtypes


def require_sum(
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    biases: Biases,
    world: int,
    sum_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[list[int], int, SumDtypes]:
    """Return the shape of every product, the dimension, and the dtypes.

    Raises:
        ValueError, TypeError: there is no such sum.
    """
    shape, dtypes = require_summands(As, Bs, addend, biases, sum_dtype, out_dtype)
    require_reduce_op(reduce_op)
    scatter_dim = dimension("scatter_dim", scatter_dim, (As[0] if addend is None else addend).shape)
    require_divisible(scatter_dim, shape, world)
    return shape, scatter_dim, dtypes


@remembered
def _described(
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    biases: Biases,
    world: int,
    sum_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> Scattered:
    shape, scatter_dim, dtypes = require_sum(
        As, Bs, addend, reduce_op, scatter_dim, biases, world, sum_dtype, out_dtype
    )
    op = "matmul_reduce_scatter" if As else "reduce_scatter"
    return describe_scatter(
        op, As, Bs, one_each(biases, Bs), addend, shape, reduce_op, scatter_dim, world, dtypes=dtypes
    )


def _eager(
    peers: Peers,
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    biases: Biases = None,
    *,
    sum_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    scattered = _described(As, Bs, addend, reduce_op, scatter_dim, biases, peers.world, sum_dtype, out_dtype)
    return scatter_sum(peers, scattered, As, Bs, one_each(biases, Bs), addend)


def _fake(
    world: int,
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    biases: Biases = None,
    *,
    sum_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    shape, scatter_dim, dtypes = require_sum(
        As, Bs, addend, reduce_op, scatter_dim, biases, world, sum_dtype, out_dtype
    )
    like = As[0] if addend is None else addend
    return like.new_empty(scattered_shape(shape, scatter_dim, world), dtype=dtypes.output)


def _setup_context(ctx: Any, inputs: Any, output: Any, *, keyword_only_inputs: Any = None) -> None:
    As, Bs, addend, ctx.reduce_op, ctx.scatter_dim, ctx.group_name, *_ = inputs  # the biases may be missing
    ctx.products = len(As)
    ctx.addend_dtype = None if addend is None else addend.dtype
    ctx.save_for_backward(*As, *Bs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    As, Bs = ctx.saved_tensors[: ctx.products], ctx.saved_tensors[ctx.products :]
    dim, dtype = ctx.scatter_dim % grad.dim(), ctx.addend_dtype
    if ctx.reduce_op == "avg":
        grad = grad / size_of_group(ctx.group_name)
    ops = torch.ops.symm_overlap
    if dtype is not None and (not As or dtype != As[0].dtype):  # the gradient of the addend is sent in its dtype
        whole = ops.all_gather(grad.to(dtype), dim, ctx.group_name)
        gathered = whole.to(As[0].dtype) if As else whole
        grad_As = [product(gathered.flatten(0, -2), B.t()).view(A.shape) for A, B in zip(As, Bs, strict=True)]
    else:
        factors = [B.t() for B in Bs]
        whole, grad_As = ops.fused_all_gather_matmul(grad.to(As[0].dtype), factors, dim, ctx.group_name)
        gathered = whole
    grad_Bs = [product_of_rows(A, gathered, dim) for A in As]
    grads = [gathered] * ctx.products
    grad_biases = (gradients(needed, grads) for needed in ctx.needs_input_grad[6:])
    return grad_As, grad_Bs, None if dtype is None else whole, None, None, None, *grad_biases


define(
    "fused_matmuls_reduce_scatter",
    "(Tensor[] As, Tensor[] Bs, Tensor? addend, str reduce_op, int scatter_dim, str group_name, "
    "Tensor[]? biases=None, *, ScalarType? sum_dtype=None, ScalarType? out_dtype=None) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    repeatable=True,
    multiplies=True,
    flop=flop.of_products,
)
