"""Partial sums are added up in rank order, so that every path gives the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import symm_overlap
from tests.collective import reference as ref
from tests.ranks import Pool, Rank

PATHS = [
    ("sequential", 1, 1),
    ("pipelined", 1, 1),
    ("pipelined", 2, 2),
    ("pipelined", 3, 1),
    ("c10d", 1, 1),
    ("c10d", 2, 1),
]
CANCELLING = (1.0, 1e8, -1e8, 0.5, 3.0)
"""By rank. In rank order, float32 loses the first value: (1 + 1e8) - 1e8 is 0. In reverse order, it is kept."""


def in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def sums(me: Rank, parts: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the result of every op that sums, and the expected one: bit for bit the sum in rank order."""
    mine, total = parts[me.rank], in_rank_order(parts)
    one = torch.ones(1, 1)
    column, of_column = mine[:, :1], total[:, :1]  # a product with 1 is not rounded
    return {
        "all_reduce": (symm_overlap.all_reduce(mine, "sum", me.group), total),
        "reduce_scatter": (symm_overlap.reduce_scatter(mine, "sum", 0, me.group), total.chunk(me.world)[me.rank]),
        "reduce_scatter, columns": (
            symm_overlap.reduce_scatter(mine, "sum", 1, me.group),
            total.chunk(me.world, 1)[me.rank],
        ),
        "matmul_reduce_scatter": (
            symm_overlap.matmul_reduce_scatter(column, one, "sum", 0, me.group),
            of_column.chunk(me.world)[me.rank],
        ),
        "matmul_all_reduce": (symm_overlap.matmul_all_reduce(column, one, "sum", me.group), of_column),
    }


def ops_with_other_bits(me: Rank, path: str, chunks: int, streams: int, values: str) -> list[str]:
    shape = (4 * me.world, 2 * me.world)
    parts = [ref.normal(shape, torch.float32, seed=rank) for rank in range(me.world)]
    if values == "cancelling":
        parts = [torch.full(shape, CANCELLING[rank]) for rank in range(me.world)]
        assert not torch.equal(in_rank_order(parts), in_rank_order(parts[::-1]))
    with symm_overlap.force_path(path, chunks=chunks, streams=streams):
        return [op for op, (found, expected) in sums(me, parts).items() if not torch.equal(found, expected)]


@pytest.mark.parametrize("values", ["cancelling", "random"])
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("world", [3, 5])
def test_every_path_adds_in_rank_order(ranks: Pool, world: int, path: tuple[str, int, int], values: str) -> None:
    assert ranks.run(world, ops_with_other_bits, *path, values) == [[]] * world
