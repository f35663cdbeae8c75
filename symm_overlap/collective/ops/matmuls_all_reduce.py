"""``fused_matmuls_all_reduce``: all-reduce the sum of several products and a tensor, in one exchange.

Tensor parallelism without sequence parallelism makes such sums in its backward pass: each layer that reads a tensor
contributes a product to its gradient. `matmul_all_reduce` describes the algorithm. Equivalent to::

    products = [A @ B + bias for A, B, bias in zip(As, Bs, biases)]
    all_reduce(sum(products) + addend, reduce_op, group)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import remembered, require_reduce_op
from ..biases import Biases, gradients, named, one_each
from ..dispatch.registration import define
from ..exchange import Call, Peers, exchange_of
from ..parts.rows import RowSums
from ..parts.scattered import matrix
from ..problem import Problem, problem
from . import flop
from .matmul_reduce_scatter import summands
from .matmuls_reduce_scatter import require_summands
from .product import product


def _require(
    As: Sequence[Tensor], Bs: Sequence[Tensor], addend: Tensor | None, reduce_op: str, biases: Biases
) -> list[int]:
    """Return the shape of every product."""
    if not As:
        raise ValueError("As is empty: to reduce the addend alone, call all_reduce")
    shape, _ = require_summands(As, Bs, addend, biases)
    require_reduce_op(reduce_op)
    return shape


@remembered
def _described(
    As: Sequence[Tensor], Bs: Sequence[Tensor], addend: Tensor | None, reduce_op: str, biases: Biases, world: int
) -> tuple[Problem, list[int]]:
    shape = _require(As, Bs, addend, reduce_op, biases)
    described = problem(
        "matmul_all_reduce",
        prod(shape[:-1]),
        shape[-1],
        sum(B.shape[0] for B in Bs),
        As[0].dtype,
        world,
        As[0].device.type,
        one_matmul=False,
        arguments=(*summands(shape, len(As), addend), ("reduce_op", reduce_op)),
        own=(*(each.shape for each in (*As, *Bs)), *named(one_each(biases, Bs))),
    )
    return described, shape


def _eager(
    peers: Peers,
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    biases: Biases = None,
) -> Tensor:
    described, shape = _described(As, Bs, addend, reduce_op, biases, peers.world)
    call = Call(peers, described, As[0].device)
    output = call.backend.new_output(As[0], described.m, described.n)
    rows = None if addend is None else matrix(addend)
    producer = RowSums(call.backend, list(map(matrix, As)), Bs, one_each(biases, Bs), rows)
    exchange_of(call).all_reduce(call, producer, output, reduce_op == "avg")
    return output if len(shape) == 2 else output.view(shape)


def _fake(
    world: int,
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    biases: Biases = None,
) -> Tensor:
    return As[0].new_empty(_require(As, Bs, addend, reduce_op, biases))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    As, Bs, addend, ctx.reduce_op, ctx.group_name, *_ = inputs  # the biases are missing if the caller passed none
    ctx.products, ctx.added = len(As), addend is not None
    ctx.save_for_backward(*As, *Bs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    As, Bs = ctx.saved_tensors[: ctx.products], ctx.saved_tensors[ctx.products :]
    grad = torch.ops.symm_overlap.all_reduce(grad, ctx.reduce_op, ctx.group_name)
    rows = grad.flatten(0, -2)
    grad_As = [product(rows, B.t()).view(A.shape) for A, B in zip(As, Bs, strict=True)]
    grad_Bs = [product(A.flatten(0, -2).t(), rows) for A in As]
    grad_biases = (gradients(needed, [grad] * ctx.products) for needed in ctx.needs_input_grad[5:])
    return grad_As, grad_Bs, grad if ctx.added else None, None, None, *grad_biases


define(
    "fused_matmuls_all_reduce",
    "(Tensor[] As, Tensor[] Bs, Tensor? addend, str reduce_op, str group_name, Tensor[]? biases=None) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    repeatable=True,
    multiplies=True,
    flop=flop.of_products,
)
