"""``all_gather``: gather every rank's shard along any dimension, without a matmul.

Each rank copies straight out of its peers' memory and starts with its next neighbour. On GPUs the copy engine does
this, and the multiprocessors stay free. The op runs the plans of `symm_overlap.collective.planners.all_gather_consume`
and `gather_then_consume` without a consumer.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import Group, dimension, group_name, remembered, require_tensor
from ..dispatch.autograd import call_op
from ..dispatch.functional import functional
from ..dispatch.registration import define
from ..exchange import Call, Peers, exchange_of
from ..layouts import PartsLayout
from ..problem import OPS, OpKind, Problem, problem

OPS["all_gather"] = OpKind(gathers=True)


@functional
def all_gather(A_shard: Tensor, gather_dim: int, group: Group) -> Tensor:
    """Gather along ``gather_dim``. Equivalent to ``torch.cat(every rank's shard, gather_dim)``.

    Args:
        A_shard: this rank's shard, with the same shape and dtype on every rank, on CPU or CUDA. The dtype may be any:
            bytes are copied as they are.
        gather_dim: any dimension.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).

    Returns:
        The gathered tensor, contiguous. The gradient of floating-point and complex tensors is a reduce-scatter.

    Raises:
        ValueError, TypeError: an argument is invalid. Raised before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not arrive before the deadline
            (`symm_overlap.timeout`).
    """
    output: Tensor = call_op(torch.ops.symm_overlap.all_gather.default, A_shard, gather_dim, group_name(group))
    return output


class _Described(NamedTuple):
    problem: Problem
    parts: PartsLayout
    shape: list[int]  # of the gathered tensor


@remembered
def _described(A_shard: Tensor, gather_dim: int, world: int) -> _Described:
    shape = _gathered_shape(A_shard, gather_dim, world)
    dim = gather_dim % A_shard.dim()
    # Dimensions after the gathered one travel with it. Dimensions before it are flattened to rows, and every rank has a
    # block of columns. If there are none before it, the gathered dimension is the rows, and every rank has a block of
    # rows.
    cut = max(1, dim)
    rows, columns = prod(A_shard.shape[:cut]), prod(A_shard.shape[cut:])
    parts = PartsLayout(rows, columns, world, last=dim > 0)
    described = problem(
        "all_gather",
        parts.total_rows,
        columns * (world if parts.last else 1),
        0,
        A_shard.dtype,
        world,
        A_shard.device.type,
        last_dim=parts.last,
        arguments=(A_shard.shape, ("gather_dim", dim)),
    )
    return _Described(described, parts, shape)


def gather(peers: Peers, A_shard: Tensor, gather_dim: int) -> Tensor:
    """Carry out the op. Other ops call this for small tensors that they need before they start."""
    described, parts, shape = _described(A_shard, gather_dim, peers.world)
    shard = A_shard.contiguous()
    if shard.dim() != 2:
        shard = shard.view(parts.rows, parts.columns)
    call = Call(peers, described, shard.device, shard)
    gathered = parts.new_gathered(shard)
    exchange_of(call).all_gather(call, parts, shard, None, gathered)
    return gathered if len(shape) == 2 else gathered.view(shape)


def _gathered_shape(A_shard: Tensor, gather_dim: int, world: int) -> list[int]:
    require_tensor("A_shard", A_shard)
    shape = list(A_shard.shape)
    shape[dimension("gather_dim", gather_dim, A_shard.shape)] *= world
    return shape


def _fake(world: int, A_shard: Tensor, gather_dim: int) -> Tensor:
    return A_shard.new_empty(_gathered_shape(A_shard, gather_dim, world))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.gather_dim, ctx.group_name = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dim = ctx.gather_dim % grad.dim()
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    sum_of_ranks = torch.ops.symm_overlap.reduce_scatter(real, "sum", dim, ctx.group_name)
    return torch.view_as_complex(sum_of_ranks) if grad.is_complex() else sum_of_ranks, None, None


define(
    "all_gather",
    "(Tensor A_shard, int gather_dim, str group_name) -> Tensor",
    eager=gather,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    repeatable=True,
    gathers=True,
)
