"""Ops accept tensors without rows, without columns, or with an empty contracted dimension like any other tensors."""

from __future__ import annotations

import pytest
import torch

import symm_overlap
from tests.collective import reference as ref
from tests.ranks import Pool, Rank

ops = torch.ops.symm_overlap
PATHS = [("sequential", 1, 1), ("pipelined", 2, 1), ("pipelined", 2, 2), ("c10d", 2, 1), ("c10d", None, None)]


def calls(me: Rank, path: str, chunks: int | None, streams: int | None) -> None:
    with symm_overlap.force_path(path, chunks=chunks, streams=streams):
        every_op(me)


def every_op(me: Rank) -> None:
    name, w = me.group_name, me.world
    for m, k, n in ((0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0), (1, 1, 1)):
        A, B = torch.ones(m, k), torch.ones(k, n)
        for dim in (0, 1):
            weight = torch.ones(k * (w if dim else 1), n)
            expected_A, expected = torch.cat([A] * w, dim), torch.cat([A] * w, dim) @ weight
            found_A, (found,) = ops.fused_all_gather_matmul(A, [weight], dim, name)
            ref.same(found_A, expected_A)
            ref.same(found, expected)
            ref.same(ops.all_gather(A, dim, name), expected_A)
            X, Y = torch.ones(m * w, k), torch.ones(k, n * w)
            size = [m * w, n * w]
            size[dim] //= w
            part = torch.full(size, float(k * w))
            ref.same(ops.fused_matmul_reduce_scatter(X, Y, "sum", dim, name), part)
            ref.same(ops.reduce_scatter(X @ Y, "sum", dim, name), part)
            kept = ops.fused_matmuls_reduce_scatter_keep(
                [X, X], [Y, Y], None, "sum", dim, name, keep=[1, 0], keep_sum=True
            )
            ref.same(kept[0], 2 * part)
            for product, expected in zip([*kept[1], kept[2]], (X @ Y, X @ Y, 2 * (X @ Y)), strict=True):
                ref.same(product, expected)
            shard = [k, n]
            shard[dim] *= w
            for transpose in (False, True):
                whole = torch.ones(shard[::-1] if transpose else shard)
                rows = torch.ones(m * (me.rank + 1), whole.shape[0])  # the number differs between ranks
                ref.same(ops.fused_all_gather_weight_matmul(rows, B, dim, transpose, name), rows @ whole)
            X, G = (torch.ones(m * (me.rank + 1), columns) for columns in shard)
            total = torch.full((k, n), float(m * w * (w + 1) // 2))
            ref.same(ops.weight_grad_reduce_scatter(X, G, "sum", dim, name), total)
        ref.same(ops.fused_matmul_all_reduce(A, B, "sum", name), A @ B * w)
        ref.same(ops.all_reduce(A, "avg", name), A)


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("world", [1, 3])
def test_ops_take_and_give_empty_tensors(ranks: Pool, world: int, path: tuple[str, int | None, int | None]) -> None:
    ranks.run(world, calls, *path)
