"""``fused_matmul_reduce_scatter``: multiply, and reduce-scatter the product, chunk by chunk.

Problem: in tensor parallelism with sequence parallelism, every row-parallel layer ends in a reduce-scatter of its
    product, which waits for the whole matmul.

Algorithm: after torch's asynchronous tensor parallelism (micro-pipelined matmul-reduce-scatter on symmetric memory,
    with the sleep that keeps two streams in step on all ranks). The chunk for the next rank is computed first and the
    local chunk last; see `symm_overlap.collective.planners.produce_reduce_scatter`. The product of every rank has the
    dtype of the inputs, as ``A @ B`` has. Products are added up in rank order in float32 (float64 for double), and the
    sum is rounded once.

``fused_matmuls_reduce_scatter`` scatters the sum of several products and a tensor. It is the gradient of an all-gather
whose result is used several times.

Routing: `symm_overlap.collective.choosing.chooser`.
Example: ``Y = torch.ops.symm_overlap.fused_matmul_reduce_scatter(A, B, "sum", 0, group.group_name)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import (
    Group,
    dimension,
    group_name,
    remembered,
    require_divisible,
    require_matmul,
    require_reduce_op,
    require_tensors,
)
from ..biases import gradient, named, require_bias
from ..dispatch.autograd import call_op, factors_to_keep
from ..dispatch.functional import functional
from ..dispatch.registration import define, size_of_group
from ..exchange import Call, Peers, exchange_of
from ..parts.scattered import ScatteredProducts, matrix
from ..problem import OPS, Arguments, OpKind, Problem, problem
from ..sum_dtypes import SumDtypes, sum_dtypes
from . import flop
from .product import product_of_rows

OPS["matmul_reduce_scatter"] = OpKind(multiplies=True, fused=True)


@functional
def matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group: Group,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply, sum the product over ranks, and scatter it along ``scatter_dim``. Equivalent to::

        product = (A @ B + bias).to(out_dtype or A.dtype)
        return reduce_scatter(product, reduce_op, scatter_dim, group)     # rank r gets part r of the sum

    Args:
        A: (..., M, K); float32, float64, bfloat16 or float16, on CPU or CUDA. K may differ between ranks; the other
            sizes may not. The call is fastest if the parts ``A.chunk(world, scatter_dim)`` are contiguous.
        B: (K, N).
        reduce_op: "sum" or "avg".
        scatter_dim: any dimension of ``A @ B`` whose size is a multiple of the world size.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        bias: (N,), or None. Every rank adds its own bias to its product, before the product is rounded and summed.
        out_dtype: the dtype of the result: that of the product, which is the default, or float32 for sums of bfloat16
            and float16. Products are sent in their own dtype, unless `sum_order` lets the library add them.

    Returns:
        This rank's part, contiguous. It has the same bits in every run: products are added up in rank order, unless
        `sum_order` says otherwise, in float32 (float64 for double). Its gradient is an all-gather-matmul.

    Raises:
        ValueError, TypeError: an argument is invalid. Raised before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not arrive before the deadline
            (`symm_overlap.timeout`).
    """
    ops, name = torch.ops.symm_overlap, group_name(group)
    output: Tensor
    if out_dtype is None:
        output = call_op(ops.fused_matmul_reduce_scatter.default, A, B, reduce_op, scatter_dim, name, bias)
    else:
        summed = [A], [B], None, reduce_op, scatter_dim, name, None if bias is None else [bias]
        output = call_op(ops.fused_matmuls_reduce_scatter.default, *summed, out_dtype=out_dtype)
    return output


def product_shape(A: Tensor, B: Tensor) -> list[int]:
    """Return the shape of ``A @ B``. Raises ValueError or TypeError if the two cannot be multiplied."""
    require_tensors([("A", A), ("B", B)])
    require_matmul("A", A, A.shape[-1] if A.dim() else 0, [("B", B)])
    return [*A.shape[:-1], B.shape[1]]


def scattered_shape(shape: Sequence[int], scatter_dim: int, world: int) -> list[int]:
    """Return the shape of one rank's part."""
    part = list(shape)
    part[scatter_dim] //= world
    return part


class Scattered(NamedTuple):
    """A reduction after which every rank has one part of the sum."""

    problem: Problem
    scatter_dim: int
    part: list[int]  # the shape of a rank's part
    average: bool
    dtype: torch.dtype  # of the result


def summands(shape: Sequence[int], products: int, addend: object) -> Arguments:
    """Return what must be the same on all ranks about the products, which have this shape, and the addend.

    The size over which a product is contracted may differ, for instance because the ranks cannot share the features of
    a layer evenly.
    """
    if products == 0:
        return (tuple(shape),)
    more = () if products == 1 and addend is None else (("products", products), ("addend", addend is not None))
    return ("product", tuple(shape)), *more


def describe_scatter(
    op: str,
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    addend: Tensor | None,
    shape: Sequence[int],
    reduce_op: str,
    scatter_dim: int,
    world: int,
    more: Arguments = (),
    dtypes: SumDtypes | None = None,
) -> Scattered:
    """Describe ``reduce_scatter(sum(A @ B + bias for A, B, bias) + addend)`` for products of this shape.

    Args:
        more: further arguments that must be the same on all ranks.
        dtypes: by default those of the tensors.
    """
    first = As[0] if As or addend is None else addend
    dtypes = dtypes or sum_dtypes(first.dtype, len(As), addend)
    reduction = ("reduce_op", reduce_op), ("scatter_dim", scatter_dim)
    described = problem(
        op,
        prod(shape[:-1]),
        shape[-1],
        sum(B.shape[0] for B in Bs),
        dtypes.parts,
        world,
        first.device.type,
        factors=dtypes.factors,
        last_dim=scatter_dim == len(shape) - 1,
        one_matmul=len(As) == 1 and addend is None and not more,
        arguments=(*summands(shape, len(As), addend), *reduction, *dtypes.named, *more),
        own=(*(each.shape for each in (*As, *Bs)), *named(biases)),
    )
    return Scattered(
        described, scatter_dim, scattered_shape(shape, scatter_dim, world), reduce_op == "avg", dtypes.output
    )


def scatter_sum(
    peers: Peers,
    scattered: Scattered,
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    addend: Tensor | None,
) -> Tensor:
    """Carry out the reduction that `describe_scatter` describes."""
    first = As[0] if addend is None else addend
    call = Call(peers, scattered.problem, first.device)
    like = first if first.dtype == scattered.dtype else first.new_empty(0, dtype=scattered.dtype)
    output = call.backend.new_output(like, *scattered.part)
    dim, dtype = scattered.scatter_dim, scattered.problem.dtype
    producer = ScatteredProducts(call.backend, As, Bs, biases, addend, dim, peers.world, dtype)
    exchange_of(call).reduce_scatter(call, producer, matrix(output), scattered.average)
    return output


def _require_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, bias: Tensor | None, world: int
) -> tuple[list[int], int]:
    shape = product_shape(A, B)
    require_reduce_op(reduce_op)
    scatter_dim = dimension("scatter_dim", scatter_dim, A.shape)
    require_divisible(scatter_dim, shape, world)
    if bias is not None:
        require_bias(("A", A), ("B", B), ("bias", bias))
    return shape, scatter_dim


@remembered
def _described(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, bias: Tensor | None, world: int) -> Scattered:
    shape, scatter_dim = _require_scatter(A, B, reduce_op, scatter_dim, bias, world)
    return describe_scatter("matmul_reduce_scatter", [A], [B], [bias], None, shape, reduce_op, scatter_dim, world)


def _eager(peers: Peers, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, bias: Tensor | None = None) -> Tensor:
    scattered = _described(A, B, reduce_op, scatter_dim, bias, peers.world)
    return scatter_sum(peers, scattered, [A], [B], [bias], None)


def _fake(world: int, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, bias: Tensor | None = None) -> Tensor:
    shape, scatter_dim = _require_scatter(A, B, reduce_op, scatter_dim, bias, world)
    return A.new_empty(scattered_shape(shape, scatter_dim, world))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ctx.reduce_op, ctx.scatter_dim, ctx.group_name, *_ = inputs  # the bias is missing if the caller passed none
    ctx.save_for_backward(*factors_to_keep(A, B))


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    A, B = ctx.saved_tensors
    needs_A, needs_B, _, _, _, *needs_bias = ctx.needs_input_grad
    scatter_dim = ctx.scatter_dim % grad.dim()
    if ctx.reduce_op == "avg":
        grad = grad / size_of_group(ctx.group_name)
    # All gradients need the gathered gradient. The all-gather-matmul returns it together with the product.
    if needs_A:
        gathered, (grad_A,) = torch.ops.symm_overlap.fused_all_gather_matmul(
            grad, [B.t()], scatter_dim, ctx.group_name, return_A=needs_B or any(needs_bias)
        )
    else:
        grad_A, gathered = None, torch.ops.symm_overlap.all_gather(grad, scatter_dim, ctx.group_name)
    grad_B = product_of_rows(A, gathered, scatter_dim) if needs_B else None
    return grad_A, grad_B, None, None, None, *(gradient(needed, gathered) for needed in needs_bias)


define(
    "fused_matmul_reduce_scatter",
    "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name, Tensor? bias=None) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    repeatable=True,
    multiplies=True,
    flop=flop.of_product,
)
