"""A lane keeps twice the symmetric memory in which its largest call puts data for its peers (docs/limits.md)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import symm_overlap
from bench.harness.stand_in import StandIn, standing_in
from symm_overlap.plan.layout import ALIGNMENT
from symm_overlap.runtime import Lane
from symm_overlap.runtime.symmetric import half_size
from tests.collective.scaled_cases import E4M3, ONE

ops = torch.ops.symm_overlap
ROWS, K, N = 64, 96, 32

# For an op: a call, and the documented number of bytes that peers read: those of the shard or of the product.
Case = Callable[[StandIn, int], tuple[Callable[[], Any], int]]


def _gathers(me: StandIn, world: int) -> dict[str, tuple[Callable[[], Any], int]]:
    group, name = me.group, me.group.group_name
    shard, weight, grad = torch.empty(ROWS, K), torch.empty(K, N), torch.empty(ROWS * world, N)
    rows = torch.empty(ROWS, K).to(E4M3)
    return {
        "all_gather": (lambda: symm_overlap.all_gather(shard, 0, group), shard.nbytes),
        "all_gather_matmul": (lambda: symm_overlap.all_gather_matmul(shard, [weight] * 3, 0, group), shard.nbytes),
        "all_gather_weight_grad": (lambda: ops.all_gather_weight_grad(shard, [grad], 0, name), shard.nbytes),
        "all_gather_weight_matmul": (
            lambda: symm_overlap.all_gather_weight_matmul(torch.empty(999, ROWS * world), shard, 0, group),
            shard.nbytes,
        ),
        "all_gather_scaled_matmul": (
            lambda: symm_overlap.all_gather_scaled_matmul(rows, [weight.t().to(E4M3).t()], ONE, [ONE], 0, group),
            rows.nbytes,
        ),
    }


def _sums(me: StandIn, world: int) -> dict[str, tuple[Callable[[], Any], int]]:
    group, name = me.group, me.group.group_name
    A, B, whole = torch.empty(ROWS * world, K), torch.empty(K, N), torch.empty(ROWS * world, N)
    A8, B8, keep = A.to(E4M3), B.t().to(E4M3).t(), {"keep": [0, 1], "keep_sum": True}
    return {
        "reduce_scatter": (lambda: symm_overlap.reduce_scatter(whole, "sum", 0, group), whole.nbytes),
        "matmul_reduce_scatter": (lambda: symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, group), whole.nbytes),
        "matmuls_reduce_scatter_keep": (
            lambda: ops.fused_matmuls_reduce_scatter_keep([A, A], [B, B], whole, "sum", 0, name, **keep),
            whole.nbytes,
        ),
        "scaled_matmul_reduce_scatter": (
            lambda: symm_overlap.scaled_matmul_reduce_scatter(A8, B8, ONE, ONE, "sum", 0, group),
            whole.nbytes // 2,
        ),
        "weight_grad_reduce_scatter": (
            lambda: ops.weight_grad_reduce_scatter(torch.empty(9, ROWS * world), torch.empty(9, N), "sum", 0, name),
            whole.nbytes,
        ),
        "all_reduce": (lambda: symm_overlap.all_reduce(whole, "sum", group), whole.nbytes),
        "matmul_all_reduce": (lambda: symm_overlap.matmul_all_reduce(A, B, "sum", group), whole.nbytes),
        "matmuls_all_reduce": (
            lambda: ops.fused_matmuls_all_reduce([A, A], [B, B], whole, "sum", name),
            whole.nbytes,
        ),
    }


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize(
    ("path", "chunks", "lane"), [("pipelined", 1, 0), ("pipelined", 3, 0), ("sequential", None, 1)]
)
def test_a_half_of_the_workspace_holds_the_shard_or_the_product(
    world: int, path: str, chunks: int | None, lane: int
) -> None:
    found: dict[str, int] = {}
    original = Lane.run

    def noted(lane: Lane, op: str, *arguments: Any, nbytes: int, **more: Any) -> None:
        found["nbytes"] = nbytes
        original(lane, op, *arguments, nbytes=nbytes, **more)

    with (
        standing_in(0, world, path=path, chunks=chunks) as me,
        symm_overlap.lane(lane),
        mock.patch.object(Lane, "run", noted),
    ):
        cases = _gathers(me, world) | _sums(me, world)
        for op, (call, nbytes) in cases.items():
            call()
            units = (chunks or 1) * (1 if op.startswith("all_gather") else world)
            # All pieces of a part have the size of its largest piece, and each starts at a multiple of 256 bytes.
            rows = ROWS if chunks is None else chunks * -(-ROWS // chunks)
            assert nbytes <= found["nbytes"] <= nbytes * rows // ROWS + units * ALIGNMENT, op
        assert me.workspace.half == half_size(max(nbytes for _, nbytes in cases.values()))


def test_the_page_on_limits_says_what_a_lane_keeps() -> None:
    """The formula in docs/limits.md computes the real size of half of a workspace."""
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    (formula,) = re.findall(r"^  half = (.*)$", page, re.MULTILINE)
    borders = [2**power + more for power in range(32) for more in (-1, 0, 1, 255)]
    for call in (each for each in borders if each):
        assert eval(formula) == half_size(call), call
        assert call <= half_size(call) < call + 2**20, "two halves need at most 2 MiB more than twice the call"
