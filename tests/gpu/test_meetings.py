"""Sums without overlap: in one kernel the ranks meet, read their peers' data, and end the call.

Inputs are small integers. Every dtype here represents their sums exactly, so outputs are compared bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap.plan import Plan, Table
from symm_overlap.settings import transformed
from tests.gpu.conditions import error_of, finish
from tests.gpu.conftest import WAITS, Worlds
from tests.ranks import Rank

pytestmark = pytest.mark.gpu(cpu_too=True)

BY_WAITS = pytest.mark.parametrize("waits", WAITS)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = ((1, 1), (2, 8), (3, 5), (7, 129), (64, 1024), (0, 4))
"""Rows of each rank, and columns. For the largest, each rank sums a part, and a second kernel gathers the parts."""


def integers(rank: int, *shape: int, call: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def sums(me: Rank) -> None:
    """Every size and dtype, back to back. Inputs are overwritten at once, and outputs are checked only at the end."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    weight = integers(0, 5, 24, call=0, dtype=torch.float32)
    with symm_overlap.force_path("sequential"):
        for call, (dtype, (rows, columns)) in enumerate((d, s) for d in DTYPES for s in SIZES):
            every = [integers(rank, me.world * rows, columns, call=call, dtype=dtype) for rank in range(me.world)]
            total = sum(each.double() for each in every)
            mine = every[me.rank].to(me.device)
            part = total.chunk(me.world)[me.rank] if rows else total
            made.append((symm_overlap.reduce_scatter(mine, "sum", 0, me.group), part.to(dtype)))
            made.append((symm_overlap.all_reduce(mine, "sum", me.group), total.to(dtype)))
            made.append((symm_overlap.all_reduce(mine, "avg", me.group), (total / me.world).to(dtype)))
            if columns == weight.shape[0]:
                product = (total @ weight.double()).to(dtype)
                B = weight.to(me.device, dtype)
                made.append((symm_overlap.matmul_all_reduce(mine, B, "sum", me.group), product))
                part = product.chunk(me.world)[me.rank]
                made.append((symm_overlap.matmul_reduce_scatter(mine, B, "sum", 0, me.group), part))
            mine.fill_(float("nan"))
    finish(me)
    for found, expected in made:
        agree(found, expected)
    symm_overlap.raise_failures()


@BY_WAITS
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_of_every_size_are_exact_back_to_back(gpu_ranks: Worlds, world: int, waits: str) -> None:
    gpu_ranks.run(world, sums, waits=waits)


def alternates(me: Rank) -> None:
    """On one lane, calls that signal by kernels alternate with calls that signal by memory operations."""
    A, B = integers(me.rank, 32, 16, call=1, dtype=torch.float32), integers(0, 16, 8, call=2, dtype=torch.float32)
    every = [integers(rank, 32, 16, call=1, dtype=torch.float32) for rank in range(me.world)]
    a, b = A.to(me.device), B.to(me.device)
    found = []
    for _ in range(20):
        with symm_overlap.force_path("pipelined", chunks=1, streams=2):
            gathered = symm_overlap.all_gather_matmul(a, [b], 0, me.group, return_A=False)[1][0]
        with symm_overlap.force_path("sequential"):
            found.append((gathered, symm_overlap.all_reduce(a, "sum", me.group)))
    finish(me)
    for gathered, summed in found:
        agree(gathered, torch.cat(every) @ B)
        agree(summed, sum(every))  # type: ignore[arg-type]
    symm_overlap.raise_failures()


@BY_WAITS
def test_kernels_and_memory_operations_signal_in_turn(gpu_ranks: Worlds, waits: str) -> None:
    gpu_ranks.run(3, alternates, waits=waits)


def is_issued_otherwise(me: Rank) -> None:
    """One rank issues the steps one by one, with a kernel for each. Its peers issue a single launch."""

    def unchanged(plan: Plan, table: Table) -> Table:
        return table

    x = integers(me.rank, 100, 33, call=3, dtype=torch.float32).to(me.device)
    expected = sum(integers(rank, 100, 33, call=3, dtype=torch.float32) for rank in range(me.world))
    with symm_overlap.force_path("sequential"):
        for late in range(2 * me.world):
            if late % me.world == me.rank:
                with transformed(unchanged):
                    found = symm_overlap.all_reduce(x, "sum", me.group)
            else:
                found = symm_overlap.all_reduce(x, "sum", me.group)
            agree(found, expected)  # type: ignore[arg-type]
    symm_overlap.raise_failures()


@BY_WAITS
def test_ranks_may_issue_the_steps_of_one_call_in_different_ways(gpu_ranks: Worlds, waits: str) -> None:
    gpu_ranks.run(3, is_issued_otherwise, waits=waits)


def comes_late(me: Rank, lane: int) -> str:
    x = torch.ones(1000, 300, device=me.device)
    with symm_overlap.lane(lane), symm_overlap.force_path("sequential"):
        symm_overlap.all_reduce(x, "sum", me.group)
        finish(me)
        dist.barrier(me.group)
        if me.rank == me.world - 1:
            time.sleep(2.0)
        with symm_overlap.timeout(0.5):
            said = error_of(me, lambda: symm_overlap.all_reduce(x, "sum", me.group))
    with symm_overlap.force_path("sequential"):  # another lane is not affected
        agree(symm_overlap.all_reduce(x, "sum", me.group), torch.full((1000, 300), float(me.world)))
    return said


@BY_WAITS
def test_a_rank_that_comes_late_leaves_nobody_with_a_wrong_sum(
    gpu_ranks: Worlds, fresh_lane: Callable[[], int], waits: str
) -> None:
    said = gpu_ranks.run(2, comes_late, fresh_lane(), waits=waits)
    assert "rank 1" in said[0], said
    assert all(said), said


def makes_another_call(me: Rank, lane: int) -> str:
    x, b = torch.ones(64, 32, device=me.device), torch.ones(32, 16, device=me.device)

    def call() -> torch.Tensor:
        if me.rank == 0:
            with symm_overlap.force_path("sequential"):
                return symm_overlap.all_reduce(x, "sum", me.group)
        with symm_overlap.force_path("pipelined", chunks=1, streams=2):
            return symm_overlap.matmul_reduce_scatter(x, b, "sum", 0, me.group)

    with symm_overlap.lane(lane), symm_overlap.timeout(60.0):
        with symm_overlap.force_path("pipelined", chunks=1, streams=2):  # allocates enough workspace for either call
            symm_overlap.matmul_all_reduce(x, torch.ones(32, 64, device=me.device), "sum", me.group)
        finish(me)
        dist.barrier(me.group)
        return error_of(me, call)


@BY_WAITS
def test_ranks_in_different_calls_are_told_though_their_signals_go_different_ways(
    gpu_ranks: Worlds, fresh_lane: Callable[[], int], waits: str
) -> None:
    began = time.monotonic()
    said = gpu_ranks.run(2, makes_another_call, fresh_lane(), waits=waits)
    assert time.monotonic() - began < 45.0  # long before the deadline
    assert all(said), said
    assert any("is in a different call" in each for each in said), said


def replays(me: Rank) -> None:
    x = torch.zeros(7, 129, device=me.device)
    large = torch.zeros(1000, 300, device=me.device)
    with symm_overlap.force_path("sequential"):
        with symm_overlap.prepare():
            symm_overlap.all_reduce(x, "sum", me.group)
            symm_overlap.all_reduce(large, "sum", me.group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [symm_overlap.all_reduce(each, "sum", me.group) for each in (x, large, x)]
        for call in range(4):
            for each in (x, large):
                each.copy_(integers(me.rank, *each.shape, call=call, dtype=torch.float32))
            expected = [
                sum(integers(rank, *each.shape, call=call, dtype=torch.float32) for rank in range(me.world))
                for each in (x, large, x)
            ]
            for _ in range(3):
                graph.replay()
            eager = [symm_overlap.all_reduce(each, "sum", me.group) for each in (x, large)] if call % 2 else []
            for found, total in zip([*outputs, *eager], [*expected, *expected], strict=False):
                agree(found, total)  # type: ignore[arg-type]
    symm_overlap.raise_failures()


@pytest.mark.gpu
@BY_WAITS
@pytest.mark.parametrize("world", [2, 3])
def test_captured_sums_are_replayed_between_others(gpu_ranks: Worlds, world: int, waits: str) -> None:
    gpu_ranks.run(world, replays, waits=waits)
