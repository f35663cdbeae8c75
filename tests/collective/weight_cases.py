"""Calls of the ops whose weight arrives in shards, for tests of the memory that their steps touch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

import symm_overlap
from tests.ranks import Rank

ROWS, COLUMNS = 5, 4  # of a shard; no tested number of chunks above 1 divides the rows


def inputs(me: Rank, weight: Tensor, dim: int, transpose: bool) -> Tensor:
    """Return a matching X. The number of its rows differs between ranks."""
    contracted = weight.shape[1 if transpose else 0] * (me.world if dim == transpose else 1)
    return torch.ones(2, 3 + me.rank, contracted, dtype=weight.dtype, requires_grad=weight.requires_grad)


def gathered_weight(me: Rank, dim: int, transpose: bool) -> None:
    """Call the op forward and backward, which runs both ops. Sums of half precision are kept in float32."""
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.ones(ROWS, COLUMNS, dtype=dtype, requires_grad=True)
        X = inputs(me, weight, dim, transpose)
        symm_overlap.all_gather_weight_matmul(X, weight, dim, me.group, transpose=transpose).float().sum().backward()


def gathered_symmetric_weight(me: Rank) -> None:
    weight = symm_mem.empty(ROWS, COLUMNS, dtype=torch.float32, device="cpu").fill_(1)
    symm_mem.rendezvous(weight, me.group_name)
    for dim, transpose in ((0, True), (0, False), (1, True), (1, False)):
        X = inputs(me, weight, dim, transpose)
        symm_overlap.all_gather_weight_matmul(X, weight, dim, me.group, transpose=transpose)


WEIGHT_CASES: dict[str, Callable[[Rank], None]] = {
    **{
        f"all_gather_weight_matmul dim {dim} {transpose=}": (
            lambda me, dim=dim, transpose=transpose: gathered_weight(me, dim, transpose)
        )
        for dim in range(2)
        for transpose in (True, False)
    },
    "all_gather_weight_matmul symmetric input": gathered_symmetric_weight,
}
