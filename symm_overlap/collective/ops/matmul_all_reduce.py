"""``fused_matmul_all_reduce``: multiply, and all-reduce the product, chunk by chunk.

Problem: in tensor parallelism without sequence parallelism, and in decoding, every row-parallel layer ends in an
    all-reduce.

Algorithm: a matmul-reduce-scatter followed by an all-gather of the sums (the two-shot all-reduce); see
    `symm_overlap.collective.planners.produce_all_reduce`. Rows are shared out evenly, but their number need not be a
    multiple of the world size: the parts of the last ranks may be short or empty. The product of every rank has the
    dtype of the inputs. Products are added up in rank order in float32 (float64 for double). One rank rounds each sum
    once, so every rank gets the same bits.

Routing: `symm_overlap.collective.choosing.chooser`.
Example: ``Y = torch.ops.symm_overlap.fused_matmul_all_reduce(A, B, "sum", group.group_name)``.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import Group, group_name, remembered, require_reduce_op
from ..biases import gradient, named, require_bias
from ..dispatch.autograd import call_op, factors_to_keep
from ..dispatch.functional import functional
from ..dispatch.registration import define
from ..exchange import Call, Peers, exchange_of
from ..parts.rows import RowProducts
from ..parts.scattered import matrix
from ..problem import OPS, OpKind, Problem, problem
from . import flop
from .matmul_reduce_scatter import product_shape, summands
from .product import product

OPS["matmul_all_reduce"] = OpKind(multiplies=True, replicates=True, fused=True)


@functional
def matmul_all_reduce(A: Tensor, B: Tensor, reduce_op: str, group: Group, bias: Tensor | None = None) -> Tensor:
    """Multiply, and sum the product over ranks. Equivalent to ``all_reduce(A @ B + bias, reduce_op, group)``.

    Args:
        A: (..., M, K); float32, float64, bfloat16 or float16, on CPU or CUDA. K may differ between ranks; the other
            sizes may not.
        B: (K, N).
        reduce_op: "sum" or "avg".
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        bias: (N,), or None. Every rank adds its own bias to its product, before the product is rounded and summed.

    Returns:
        (..., M, N), contiguous. It has the same bits on every rank, and in every run unless `sum_order` says otherwise.
        Every rank is expected to use it: its gradient is the sum (or mean) of the ranks' gradients, as with
        ``torch.distributed.nn.functional.all_reduce``.

    Raises:
        ValueError, TypeError: an argument is invalid. Raised before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not arrive before the deadline
            (`symm_overlap.timeout`).
    """
    op = torch.ops.symm_overlap.fused_matmul_all_reduce.default
    output: Tensor = call_op(op, A, B, reduce_op, group_name(group), bias)
    return output


def _require(A: Tensor, B: Tensor, reduce_op: str, bias: Tensor | None) -> list[int]:
    """Return the shape of the product."""
    shape = product_shape(A, B)
    require_reduce_op(reduce_op)
    if bias is not None:
        require_bias(("A", A), ("B", B), ("bias", bias))
    return shape


@remembered
def _described(A: Tensor, B: Tensor, reduce_op: str, bias: Tensor | None, world: int) -> tuple[Problem, list[int]]:
    shape = _require(A, B, reduce_op, bias)
    rows, columns = prod(shape[:-1]), shape[-1]
    described = problem(
        "matmul_all_reduce",
        rows,
        columns,
        B.shape[0],
        A.dtype,
        world,
        A.device.type,
        arguments=(*summands(shape, 1, None), ("reduce_op", reduce_op)),
        own=(A.shape, B.shape, *named([bias])),
    )
    return described, shape


def _eager(peers: Peers, A: Tensor, B: Tensor, reduce_op: str, bias: Tensor | None = None) -> Tensor:
    described, shape = _described(A, B, reduce_op, bias, peers.world)
    call = Call(peers, described, A.device)
    output = call.backend.new_output(A, described.m, described.n)
    exchange_of(call).all_reduce(call, RowProducts(call.backend, matrix(A), B, bias), output, reduce_op == "avg")
    return output if len(shape) == 2 else output.view(shape)


def _fake(world: int, A: Tensor, B: Tensor, reduce_op: str, bias: Tensor | None = None) -> Tensor:
    return A.new_empty(_require(A, B, reduce_op, bias))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ctx.reduce_op, ctx.group_name, *_ = inputs  # the bias is missing if the caller passed none
    ctx.save_for_backward(*factors_to_keep(A, B))


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    A, B = ctx.saved_tensors
    grad = torch.ops.symm_overlap.all_reduce(grad, ctx.reduce_op, ctx.group_name)
    rows = grad.flatten(0, -2)
    grad_A = product(rows, B.t()).view(*grad.shape[:-1], B.shape[0]) if ctx.needs_input_grad[0] else None
    grad_B = product(A.flatten(0, -2).t(), rows) if ctx.needs_input_grad[1] else None
    return grad_A, grad_B, None, None, *(gradient(needed, grad) for needed in ctx.needs_input_grad[4:])


define(
    "fused_matmul_all_reduce",
    "(Tensor A, Tensor B, str reduce_op, str group_name, Tensor? bias=None) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    repeatable=True,
    multiplies=True,
    flop=flop.of_product,
)
