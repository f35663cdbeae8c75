"""``all_gather``: gather every rank's shard along any dimension, without a matmul.

Ranks copy straight out of each other's memory, each starting with its next neighbour
(`symm_overlap.plan.all_gather_consume` without consumers); on GPUs the copy engine does it, and the multiprocessors
stay free.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from .._torch import resolve_group
from ..memory import new_output
from .arguments import Group, check_tensors, dimension, group_name
from .call import Call, describe
from .library import define, functional


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
    output: Tensor = torch.ops.symm_overlap.all_gather(A_shard, gather_dim, group_name(group))
    return output


def _eager(A_shard: Tensor, gather_dim: int, group_name: str) -> Tensor:
    group = resolve_group(group_name)
    output = new_output(A_shard, *_gathered_shape(A_shard, gather_dim, group.size()))
    dim = gather_dim % A_shard.dim()
    before, part = prod(A_shard.shape[:dim]), prod(A_shard.shape[dim:])
    # Dimensions after the gathered one travel with it; those before it are the rows.
    columns = output.view(before, group.size() * part)
    shard = A_shard.contiguous().view(before, part)
    with Call(
        "all_gather", group, A_shard, 0, 0, 0, before, lambda: f"({describe(A_shard)}, gather_dim={dim})", shard
    ) as call:
        call.all_gather(shard, lambda rank: columns[:, rank * part : (rank + 1) * part], None, [output])
        return output


def _gathered_shape(A_shard: Tensor, gather_dim: int, world: int) -> list[int]:
    check_tensors([("A_shard", A_shard)])
    shape = list(A_shard.shape)
    shape[dimension("gather_dim", gather_dim, A_shard)] *= world
    return shape


def _fake(A_shard: Tensor, gather_dim: int, group_name: str) -> Tensor:
    return A_shard.new_empty(_gathered_shape(A_shard, gather_dim, resolve_group(group_name).size()))


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
