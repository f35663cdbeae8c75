"""``fused_matmul_all_reduce``: multiply, and all-reduce the product, chunk by chunk. ``all_reduce`` is the same without
a matmul.

Problem: in tensor parallelism without sequence parallelism, and in decoding, every row-parallel layer ends in an
    all-reduce.

Algorithm: a matmul-reduce-scatter followed by an all-gather of the sums (the two-shot all-reduce); see
`symm_overlap.plan.produce_all_reduce`. Rows are shared out evenly but need not divide: the last ranks' parts may be
short or empty. Every rank's product has the inputs' dtype; products are added up in rank order in float32 (float64 for
double), and the sum is rounded once, by one rank: every rank gets the same bits.

Routing: `paths`. Example: ``Y = torch.ops.symm_overlap.fused_matmul_all_reduce(A, B, "sum", group.group_name)``.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from .._torch import resolve_group
from ..memory import new_output
from .arguments import Group, check_reduce_op, check_tensors, group_name
from .call import Call, describe
from .engine import Chunk, bounds
from .library import define, functional
from .matmul_reduce_scatter import check_product
from .multiply import multiply, product


@functional
def matmul_all_reduce(A: Tensor, B: Tensor, reduce_op: str, group: Group) -> Tensor:
    """Multiply, and sum over ranks. Equivalent to ``all_reduce(A @ B, reduce_op, group)``.

    Args:
        A: (..., M, K), of one shape on all ranks; float32, float64, bfloat16 or float16, on CPU or CUDA.
        B: (K, N).
        reduce_op: "sum" or "avg".
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).

    Returns:
        (..., M, N), contiguous; the same bits on every rank and in every run. The gradient of an output that every rank
        uses is the sum of the ranks' gradients, as with ``torch.distributed.nn.functional.all_reduce``.

    Raises:
        ValueError, TypeError: bad arguments, before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not come before the deadline
        (`symm_overlap.timeout`).
    """
    output: Tensor = torch.ops.symm_overlap.fused_matmul_all_reduce(A, B, reduce_op, group_name(group))
    return output


@functional
def all_reduce(X: Tensor, reduce_op: str, group: Group) -> Tensor:
    """Sum over ranks. Equivalent to ``torch.distributed.all_reduce`` out of place.

    Args:
        X: of one shape on all ranks; float32, float64, bfloat16 or float16, on CPU or CUDA.
        reduce_op: "sum" or "avg".
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).

    Returns:
        The sum or mean, contiguous; the same bits on every rank and in every run. Its gradient is an all-reduce.

    Raises:
        ValueError, TypeError: bad arguments, before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not come before the deadline
            (`symm_overlap.timeout`).
    """
    output: Tensor = torch.ops.symm_overlap.all_reduce(X, reduce_op, group_name(group))
    return output


def _rows_of(call: Call, rows: int, chunk: Chunk, length: int) -> slice:
    """The rows of the whole that a chunk of ``length`` rows covers."""
    parts = bounds(rows, call.world)
    start = parts[chunk[0]] + bounds(parts[1], call.choice.chunks)[chunk[1]]
    return slice(start, start + length)


def _eager(A: Tensor, B: Tensor, reduce_op: str, group_name: str) -> Tensor:
    shape = check_product(A, B)
    check_reduce_op(reduce_op)
    group = resolve_group(group_name)
    rows = prod(shape[:-1])
    with Call(
        "matmul_all_reduce",
        group,
        A,
        rows,
        shape[-1],
        B.shape[0],
        -(-rows // group.size()),
        lambda: f"({describe(A, B)}, {reduce_op})",
    ) as call:
        left = A.reshape(rows, A.shape[-1])
        if call.sequential:
            whole = A.new_empty(shape)
            multiply(left, B, whole.view(rows, shape[-1]))
            return _sum_over_ranks(call, whole, reduce_op)
        output = new_output(A, rows, shape[-1])

        def produce(chunk: Chunk, out: Tensor) -> None:
            multiply(left[_rows_of(call, rows, chunk, out.shape[0])], B, out)

        call.all_reduce(produce, output, average=reduce_op == "avg")
        return output.view(shape)


def _sum_over_ranks(call: Call, X: Tensor, reduce_op: str) -> Tensor:
    """The plain all-reduce of a tensor, shared out by elements: it may have fewer rows than there are ranks."""
    flat = X.reshape(-1, 1)
    output = torch.empty_like(flat, memory_format=torch.contiguous_format)
    call.all_reduce(
        lambda chunk, out: out.copy_(flat[_rows_of(call, len(flat), chunk, out.shape[0])]),
        output,
        average=reduce_op == "avg",
    )
    return output.view(X.shape)


def _fake(A: Tensor, B: Tensor, reduce_op: str, group_name: str) -> Tensor:
    check_reduce_op(reduce_op)
    resolve_group(group_name)
    return A.new_empty(check_product(A, B))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ctx.reduce_op, ctx.group_name = inputs
    ctx.save_for_backward(A, B)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    A, B = ctx.saved_tensors
    grad = torch.ops.symm_overlap.all_reduce(grad, ctx.reduce_op, ctx.group_name)
    rows = grad.flatten(0, -2)
    grad_A = product(rows, B.t()).view(A.shape) if ctx.needs_input_grad[0] else None
    grad_B = product(A.flatten(0, -2).t(), rows) if ctx.needs_input_grad[1] else None
    return grad_A, grad_B, None, None


def _eager_all_reduce(X: Tensor, reduce_op: str, group_name: str) -> Tensor:
    check_tensors([("X", X)])
    check_reduce_op(reduce_op)
    group = resolve_group(group_name)
    with Call("all_reduce", group, X, X.numel(), 0, 0, X.numel(), lambda: f"({describe(X)}, {reduce_op})") as call:
        return _sum_over_ranks(call, X, reduce_op)


def _fake_all_reduce(X: Tensor, reduce_op: str, group_name: str) -> Tensor:
    check_tensors([("X", X)])
    check_reduce_op(reduce_op)
    resolve_group(group_name)
    return X.new_empty(X.shape)


def _setup_all_reduce(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.reduce_op, ctx.group_name = inputs


def _backward_all_reduce(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.symm_overlap.all_reduce(grad, ctx.reduce_op, ctx.group_name), None, None


define(
    "fused_matmul_all_reduce",
    "(Tensor A, Tensor B, str reduce_op, str group_name) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    multiplies=True,
)
define(
    "all_reduce",
    "(Tensor X, str reduce_op, str group_name) -> Tensor",
    eager=_eager_all_reduce,
    fake=_fake_all_reduce,
    setup_context=_setup_all_reduce,
    backward=_backward_all_reduce,
)
