"""Calls that repeat an earlier one (tests/collective/test_repeated.py), on every path of a GPU."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch

import symm_overlap
from tests.collective.gradient_cases import CASES
from tests.collective.test_repeated import CALLS, check, counted
from tests.gpu.conditions import PATHS, Path, finish, on_path
from tests.gpu.conftest import WAITS, Worlds
from tests.ranks import Rank

pytestmark = pytest.mark.gpu

INTERPRETED = "SYMM_OVERLAP_HOST_GPU" in os.environ
"""Whether the kernels of the path "fused" run in an interpreter. Then their flags need Python."""

KINDS = list({(type(case).__name__, case.reduce_op): case for case in CASES}.values())
"""The last case of each kind."""


def every_kind(me: Rank, path: Path, dtype: torch.dtype) -> int:
    """Return how many calls were repeated."""
    with on_path(path), counted() as found:
        for number in range(CALLS):
            for case in KINDS:
                if dtype == torch.float32 or case.reduce_op == "sum":
                    check(me, case, number, nullcontext(), dtype)
    finish(me)
    return sum(found)


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_repeated_calls_compute_what_the_first_one_did(
    gpu_ranks: Worlds, path: Path, dtype: torch.dtype, waits: str
) -> None:
    hits = gpu_ranks.run(2, every_kind, path, dtype, waits=waits)[0]
    assert hits > 0 or path[0] == "c10d", "no call was repeated"


def between_replays(me: Rank, path: str) -> None:
    """Calls of the host are repeated, those of a capture and its replays are not, and both take turns."""
    x, results = torch.ones(64, 64, device=me.device), []
    with symm_overlap.force_path(path):
        with symm_overlap.prepare(), torch.no_grad():
            symm_overlap.matmul_all_reduce(x, x, "sum", me.group)
        with counted() as before:
            for number in range(4):
                results.append(symm_overlap.matmul_all_reduce(x.fill_(number), x, "sum", me.group))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), counted() as captured:
            inside = symm_overlap.matmul_all_reduce(x, x, "sum", me.group)
        for number in range(4, 8):
            x.fill_(number)
            graph.replay()
            results.append(inside.clone())
            results.append(symm_overlap.matmul_all_reduce(x, x, "sum", me.group))
    finish(me)
    assert any(before) or (path == "fused" and INTERPRETED)
    assert not any(captured)
    wanted = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert [result.unique().tolist() for result in results] == [[number**2 * 64.0 * me.world] for number in wanted]


@pytest.mark.parametrize("path", ["sequential", "pipelined", "fused"])
def test_repeated_calls_between_replays_of_a_graph(gpu_ranks: Worlds, path: str) -> None:
    gpu_ranks.run(2, between_replays, path)


def places_in_turn(me: Rank, path: str) -> int:
    """Gather from two places in symmetric memory, which peers read in place, and from other memory, in turn."""
    room = symm_overlap.empty(4 * 64, 32, group=me.group, device=me.device)
    places = room[:64], torch.empty(64, 32, device=me.device), room[128:192]
    B, results = torch.ones(32, 16, device=me.device), []
    with symm_overlap.force_path(path, chunks=2), counted() as found:
        for number in range(24):
            A = places[(number * number + number // 7) % 3].fill_(me.world * number + me.rank)
            results.append(symm_overlap.all_gather_matmul(A, [B], 0, me.group))
    finish(me)
    for number, (gathered, (product,)) in enumerate(results):
        assert gathered is not None
        for rank in range(me.world):
            one = me.world * number + rank
            assert gathered[64 * rank : 64 * (rank + 1)].unique().tolist() == [one]
            assert product[64 * rank : 64 * (rank + 1)].unique().tolist() == [32 * one]
    return sum(found)


@pytest.mark.parametrize("path", ["pipelined", "fused"])
def test_what_is_gathered_may_be_in_symmetric_memory_in_some_calls(gpu_ranks: Worlds, path: str) -> None:
    hits = gpu_ranks.run(2, places_in_turn, path)[0]
    assert hits > 0 or (path == "fused" and INTERPRETED)
