"""``all_reduce``: sum over ranks, without a matmul.

This is the two-shot all-reduce. Every rank sums its share of the elements straight out of the peers' memory, in rank
order, and accumulates in float32 (float64 for double). Then the ranks gather the sums. Every rank gets the same bits.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import Group, group_name, remembered, require_reduce_op, require_tensors
from ..dispatch.autograd import call_op
from ..dispatch.functional import functional
from ..dispatch.registration import define
from ..exchange import Call, Peers, exchange_of
from ..parts.rows import Rows
from ..problem import OPS, OpKind, Problem, problem

OPS["all_reduce"] = OpKind(replicates=True)


@functional
def all_reduce(X: Tensor, reduce_op: str, group: Group) -> Tensor:
    """Sum over ranks. Equivalent to ``torch.distributed.all_reduce``, out of place.

    Args:
        X: with the same shape on every rank; float32, float64, bfloat16 or float16, on CPU or CUDA.
        reduce_op: "sum" or "avg".
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).

    Returns:
        The sum or mean, contiguous. It has the same bits on every rank, and in every run unless `sum_order` says
        otherwise. Its gradient is an all-reduce.

    Raises:
        ValueError, TypeError: an argument is invalid. Raised before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not arrive before the deadline
            (`symm_overlap.timeout`).
    """
    output: Tensor = call_op(torch.ops.symm_overlap.all_reduce.default, X, reduce_op, group_name(group))
    return output


@remembered
def _described(X: Tensor, reduce_op: str, world: int) -> Problem:
    _require(X, reduce_op)
    rows, columns = prod(X.shape[:-1]), X.shape[-1] if X.dim() else 1
    arguments = (X.shape, ("reduce_op", reduce_op))
    return problem("all_reduce", rows, columns, 0, X.dtype, world, X.device.type, arguments=arguments)


def _eager(peers: Peers, X: Tensor, reduce_op: str) -> Tensor:
    described = _described(X, reduce_op, peers.world)
    call = Call(peers, described, X.device)
    output = call.backend.new_output(X, described.m, described.n)
    rows = Rows(call.backend, X if X.dim() == 2 else X.reshape(described.m, described.n))
    exchange_of(call).all_reduce(call, rows, output, reduce_op == "avg")
    return output if X.dim() == 2 else output.view(X.shape)


def _require(X: Tensor, reduce_op: str) -> None:
    require_tensors([("X", X)])
    require_reduce_op(reduce_op)


def _fake(world: int, X: Tensor, reduce_op: str) -> Tensor:
    _require(X, reduce_op)
    return X.new_empty(X.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.reduce_op, ctx.group_name = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.symm_overlap.all_reduce(grad, ctx.reduce_op, ctx.group_name), None, None


define(
    "all_reduce",
    "(Tensor X, str reduce_op, str group_name) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    repeatable=True,
)
