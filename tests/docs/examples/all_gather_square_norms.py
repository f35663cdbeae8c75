"""``all_gather_square_norms``: the squared length of every gathered row, without storing the gathered rows.

Equivalent to ``all_gather(A_shard, 0, group).square().sum(1)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from symm_overlap.collective.arguments import Group, group_name, require_tensors
from symm_overlap.collective.dispatch.autograd import call_op
from symm_overlap.collective.dispatch.functional import functional
from symm_overlap.collective.dispatch.registration import define
from symm_overlap.collective.exchange import Call, Peers, exchange_of
from symm_overlap.collective.layouts import PartsLayout
from symm_overlap.collective.problem import OPS, OpKind, problem

OPS["all_gather_square_norms"] = OpKind(gathers=True)


@functional
def all_gather_square_norms(A_shard: Tensor, group: Group) -> Tensor:
    """Compute the squared length of every gathered row: ``all_gather(A_shard, 0, group).square().sum(1)``.

    Args:
        A_shard: (M, K), this rank's rows. The shape is the same on all ranks.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).

    Returns:
        (world * M,).

    Raises:
        ValueError, TypeError: bad arguments, before any communication.
    """
    norms: Tensor = call_op(torch.ops.symm_overlap.all_gather_square_norms.default, A_shard, group_name(group))
    return norms


class SquareNorms:
    """The consumer, which processes a single part, all shards in place, or the gathered tensor."""

    accumulates = False  # every part writes its own rows of the output

    def __init__(self, rows: int, norms: Tensor) -> None:
        self.rows, self.norms, self.outputs = rows, norms, [norms]

    def part(self, rank: int, start: int, part: Tensor) -> None:
        """Process the part of the shard of ``rank`` that begins at row ``start``."""
        first = rank * self.rows + start
        torch.sum(part.square(), 1, out=self.norms[first : first + part.shape[0]])

    def shards(self, shards: Sequence[Tensor]) -> None:
        """Process the shards of all ranks, in rank order."""
        for rank, shard in enumerate(shards):
            self.part(rank, 0, shard)

    def whole(self, gathered: Tensor) -> None:
        """Process the gathered tensor."""
        torch.sum(gathered.square(), 1, out=self.norms)


def _require(A_shard: Tensor) -> None:
    require_tensors([("A_shard", A_shard)])
    if A_shard.dim() != 2:
        raise ValueError(f"A_shard of shape {tuple(A_shard.shape)} must be a matrix (M, K)")


def _eager(peers: Peers, A_shard: Tensor) -> Tensor:
    _require(A_shard)
    rows, columns = A_shard.shape
    parts, shard = PartsLayout(rows, columns, peers.world, last=False), A_shard.contiguous()
    norms = shard.new_empty(parts.total_rows)
    # Describes the call. The chooser picks a path from it, and it must be the same on every rank. Equal calls get the
    # same object.
    described = problem(
        "all_gather_square_norms",
        parts.total_rows,
        columns,
        0,
        A_shard.dtype,
        peers.world,
        A_shard.device.type,
        arguments=(A_shard.shape,),
    )
    call = Call(peers, described, shard.device, shard)
    exchange_of(call).all_gather(call, parts, shard, SquareNorms(rows, norms), None)
    return norms


def _fake(world: int, A_shard: Tensor) -> Tensor:
    _require(A_shard)
    return A_shard.new_empty(world * A_shard.shape[0])


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    A_shard, ctx.group_name = inputs
    ctx.save_for_backward(A_shard)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (A_shard,) = ctx.saved_tensors
    mine = torch.ops.symm_overlap.reduce_scatter(grad, "sum", 0, ctx.group_name)
    return 2 * A_shard * mine.unsqueeze(1), None


define(
    "all_gather_square_norms",
    "(Tensor A_shard, str group_name) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
