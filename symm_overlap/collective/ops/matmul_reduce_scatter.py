"""``fused_matmul_reduce_scatter``: multiply, and reduce-scatter the product, chunk by chunk.

Problem: in tensor parallelism with sequence parallelism every row-parallel layer ends in a reduce-scatter of its
    product, which waits for the whole matmul.

Algorithm: after torch's asynchronous tensor parallelism (micro-pipelined matmul-reduce-scatter on symmetric memory,
    with the sleep that keeps two streams in step on all ranks): the chunk for the next rank is computed first and the
    own one last; see `symm_overlap.plan.produce_reduce_scatter`. Every rank's product has the inputs' dtype, as that
    of ``A @ B``; products are added up in rank order in float32 (float64 for double), and the sum is rounded once.

``fused_matmuls_reduce_scatter`` scatters the sum of several products and a tensor: the gradient of an all-gather with
many readers.

Routing: `paths`. Example: ``Y = torch.ops.symm_overlap.fused_matmul_reduce_scatter(A, B, "sum", 0, group.group_name)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._torch import resolve_group
from ..memory import new_output
from .arguments import Group, check_divisible, check_matmul, check_reduce_op, check_tensors, dimension, group_name
from .call import Call, describe
from .engine import Chunk, bounds
from .library import define, functional
from .multiply import multiply, product


@functional
def matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group: Group) -> Tensor:
    """Multiply, and scatter the sum over ranks along ``scatter_dim``. Equivalent to::

        return reduce_scatter(A @ B, reduce_op, scatter_dim, group)     # rank r gets part r of the sum

    Args:
        A: (..., M, K), of one shape on all ranks; float32, float64, bfloat16 or float16, on CPU or CUDA.
            Fastest when the parts that ``A.chunk(world, scatter_dim)`` makes are contiguous.
        B: (K, N).
        reduce_op: "sum" or "avg".
        scatter_dim: any dimension of ``A @ B``; its size is a multiple of the world size.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).

    Returns:
        This rank's part, contiguous. The same bits in every run: products are summed in rank order in float32 (float64
        for double).

    Raises:
        ValueError, TypeError: bad arguments, before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not come before the deadline
        (`symm_overlap.timeout`).
    """
    output: Tensor = torch.ops.symm_overlap.fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name(group))
    return output


def check_product(A: Tensor, B: Tensor) -> list[int]:
    """The shape of ``A @ B``. Raises ValueError or TypeError when there is none."""
    check_tensors([("A", A), ("B", B)])
    check_matmul("A", A, A.shape[-1] if A.dim() else 0, [("B", B)])
    return [*A.shape[:-1], B.shape[1]]


def scattered_shape(shape: Sequence[int], scatter_dim: int, world: int) -> list[int]:
    """The shape of one rank's part."""
    part = list(shape)
    part[scatter_dim] //= world
    return part


def scatter_sum(
    call: Call,
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    shape: Sequence[int],
    scatter_dim: int,
    average: bool,
) -> Tensor:
    """``reduce_scatter(sum(A @ B for A, B) + addend)`` for tensors of one product shape."""
    like = addend if addend is not None else As[0]
    part_shape = scattered_shape(shape, scatter_dim, call.world)
    columns = part_shape[-1]
    output = new_output(like, *part_shape)
    rows = bounds(prod(part_shape[:-1]), call.choice.chunks)
    last = scatter_dim == len(shape) - 1

    if call.sequential and As:
        # One sum, whole; what follows is the plain collective.
        make_whole = partial(_multiply_whole, As, Bs, addend)
        if call.in_place and scatter_dim == 0:  # parts are blocks of rows: made where the peers read them
            call.reduce_scatter(None, _matrix(output), average=average, at_once=make_whole)
            return output
        addend = like.new_empty(shape)
        make_whole(_matrix(addend))
        As, Bs = [], []

    def part_of(tensor: Tensor, owner: int) -> Tensor:
        """The rows (or, along the last dimension, the columns) of ``tensor`` that belong to ``owner``."""
        part = tensor.narrow(scatter_dim, owner * part_shape[scatter_dim], part_shape[scatter_dim])
        return _matrix(part)

    @lru_cache(maxsize=len(call.choice.compute))  # the pieces of one part, on each stream, follow one another
    def operands(owner: int) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """What is multiplied and added for ``owner``, as matrices; a part whose rows are not together in memory is
        copied.
        """
        lefts = [_matrix(A) if last else part_of(A, owner) for A in As]
        rights = [B.narrow(1, owner * columns, columns) if last else B for B in Bs]
        return lefts, rights, None if addend is None else part_of(addend, owner)

    def produce(chunk: Chunk, out: Tensor) -> None:
        owner, piece = chunk
        lefts, rights, extra = operands(owner)
        start, stop = rows[piece], rows[piece + 1]
        if not lefts:
            out.copy_(extra[start:stop])  # type: ignore[index]
            return
        multiply(lefts[0][start:stop], rights[0], out)
        for left, right in zip(lefts[1:], rights[1:], strict=True):
            multiply(left[start:stop], right, out, add=True)
        if extra is not None:
            out.add_(extra[start:stop])

    call.reduce_scatter(produce, _matrix(output), average=average)
    return output


def _multiply_whole(As: Sequence[Tensor], Bs: Sequence[Tensor], addend: Tensor | None, out: Tensor) -> None:
    """out = sum(A @ B for A, B) + addend, flat."""
    multiply(_matrix(As[0]), Bs[0], out)
    for A, B in zip(As[1:], Bs[1:], strict=True):
        multiply(_matrix(A), B, out, add=True)
    if addend is not None:
        out.add_(_matrix(addend))


def _matrix(tensor: Tensor) -> Tensor:
    """All rows of ``tensor``, of which there are so many even when they are empty."""
    return tensor.reshape(prod(tensor.shape[:-1]), tensor.shape[-1])


def _check_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, world: int) -> tuple[list[int], int]:
    shape = check_product(A, B)
    check_reduce_op(reduce_op)
    scatter_dim = dimension("scatter_dim", scatter_dim, A)
    check_divisible(scatter_dim, shape, world)
    return shape, scatter_dim


def _eager(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    group = resolve_group(group_name)
    shape, scatter_dim = _check_scatter(A, B, reduce_op, scatter_dim, group.size())
    m, n, k = prod(shape[:-1]), shape[-1], B.shape[0]
    rows = prod(scattered_shape(shape, scatter_dim, group.size())[:-1])
    with Call(
        "matmul_reduce_scatter", group, A, m, n, k, rows, lambda: f"({describe(A, B)}, {reduce_op}, {scatter_dim=})"
    ) as call:
        return scatter_sum(call, [A], [B], None, shape, scatter_dim, reduce_op == "avg")


def _fake(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    world = resolve_group(group_name).size()
    shape, scatter_dim = _check_scatter(A, B, reduce_op, scatter_dim, world)
    return A.new_empty(scattered_shape(shape, scatter_dim, world))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ctx.reduce_op, ctx.scatter_dim, ctx.group_name = inputs
    ctx.save_for_backward(A, B)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    A, B = ctx.saved_tensors
    needs_A, needs_B = ctx.needs_input_grad[:2]
    scatter_dim = ctx.scatter_dim % A.dim()
    if ctx.reduce_op == "avg":
        grad = grad / resolve_group(ctx.group_name).size()
    # One gather of the gradient feeds both: the gathered tensor comes with the product.
    if needs_A:
        gathered, (grad_A,) = torch.ops.symm_overlap.fused_all_gather_matmul(
            grad, [B.t()], scatter_dim, ctx.group_name, return_A=needs_B
        )
    else:
        grad_A, gathered = None, torch.ops.symm_overlap.all_gather(grad, scatter_dim, ctx.group_name)
    grad_B = product_of_rows(A, gathered, scatter_dim) if needs_B else None
    return grad_A, grad_B, None, None, None


def product_of_rows(A: Tensor, G: Tensor, dim: int) -> Tensor:
    """``A.T @ G`` over all rows, in the order that needs no copy when ``dim`` is the outermost in memory."""
    if dim != A.dim() - 1:
        A, G = A.movedim(dim, 0), G.movedim(dim, 0)
    return product(A.flatten(0, -2).t(), G.flatten(0, -2))


define(
    "fused_matmul_reduce_scatter",
    "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    multiplies=True,
)
