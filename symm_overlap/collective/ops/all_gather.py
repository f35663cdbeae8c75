"""``all_gather``: gather every rank's shard along any dimension, without a matmul.

Ranks copy straight out of each other's memory, each starting with its next neighbour; on GPUs the copy engine does it,
and the multiprocessors stay free. The plans are those of `symm_overlap.collective.planners.all_gather_consume` and
`gather_then_consume`, without a consumer.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import Group, dimension, group_name, require_tensors
from ..exchange import Call, Peers, exchange_of
from ..layouts import PartsLayout
from ..registration import call_op, define, functional


@functional
def all_gather(A_shard: Tensor, gather_dim: int, group: Group) -> Tensor:
    """Gather along ``gather_dim``. Equivalent to ``torch.cat(every rank's shard, gather_dim)``.

    Args:
        A_shard: this rank's shard, of one shape on all ranks; float32, float64, bfloat16 or float16, on CPU or CUDA.
        gather_dim: any dimension.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).

    Returns:
        The gathered tensor, contiguous. Its gradient is a reduce-scatter.

    Raises:
        ValueError, TypeError: bad arguments, before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not come before the deadline
        (`symm_overlap.timeout`).
    """
    output: Tensor = call_op(torch.ops.symm_overlap.all_gather.default, A_shard, gather_dim, group_name(group))
    return output


def _eager(peers: Peers, A_shard: Tensor, gather_dim: int) -> Tensor:
    shape = _gathered_shape(A_shard, gather_dim, peers.world)
    dim = gather_dim % A_shard.dim()
    # Dimensions after the gathered one travel with it. Those before it are rows, of which every rank has a block of
    # columns; without any, every rank has a block of rows.
    if dim == 0:
        rows, columns = A_shard.shape[0], prod(A_shard.shape[1:])
    else:
        rows, columns = prod(A_shard.shape[:dim]), prod(A_shard.shape[dim:])
    parts = PartsLayout(rows, columns, peers.world, last=dim > 0)
    shard = A_shard.contiguous().view(rows, columns)
    call = Call(
        peers,
        "all_gather",
        A_shard,
        parts.total_rows,
        columns * (peers.world if parts.last else 1),
        0,
        (A_shard.shape, ("gather_dim", dim)),
        last_dim=parts.last,
        shard=shard,
    )
    gathered = parts.new_gathered(shard)
    exchange_of(call).all_gather(call, parts, shard, None, gathered)
    return gathered.view(shape)


def _gathered_shape(A_shard: Tensor, gather_dim: int, world: int) -> list[int]:
    require_tensors([("A_shard", A_shard)])
    shape = list(A_shard.shape)
    shape[dimension("gather_dim", gather_dim, A_shard)] *= world
    return shape


def _fake(world: int, A_shard: Tensor, gather_dim: int) -> Tensor:
    return A_shard.new_empty(_gathered_shape(A_shard, gather_dim, world))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.gather_dim, ctx.group_name = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.symm_overlap.reduce_scatter(grad, "sum", ctx.gather_dim, ctx.group_name), None, None


define(
    "all_gather",
    "(Tensor A_shard, int gather_dim, str group_name) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
