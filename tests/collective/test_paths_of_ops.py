"""Ops use the path that `explain` predicts or, if a path is forced, that path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import symm_overlap
from symm_overlap.blocks import force_path
from symm_overlap.collective.choosing.choice import Choice
from symm_overlap.collective.exchange import Call
from symm_overlap.collective.explain import explain
from symm_overlap.collective.problem import OPS
from tests.collective.scaled_cases import ONE
from tests.ranks import Pool, Rank
from tests.transforms import choices, recorded


def plans_run(me: Rank) -> dict[str, set[str]]:
    """Return, by path, the ops that ran a plan."""
    ran: dict[str, set[str]] = {}
    name, A, B = me.group_name, torch.ones(4 * me.world, 4), torch.ones(4, 2)
    A8, B8 = A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn)
    calls = {
        "all_gather_matmul": lambda: symm_overlap.all_gather_matmul(A, [B], 0, name),
        "all_gather_weight_matmul": lambda: symm_overlap.all_gather_weight_matmul(A, B, 1, name),
        "weight_grad_reduce_scatter": lambda: torch.ops.symm_overlap.weight_grad_reduce_scatter(
            torch.ones(3, 4 * me.world), torch.ones(3, 2), "sum", 0, name
        ),
        "matmul_reduce_scatter": lambda: symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, name),
        "matmul_all_reduce": lambda: symm_overlap.matmul_all_reduce(A, B, "sum", name),
        "all_gather_scaled_matmul": lambda: symm_overlap.all_gather_scaled_matmul(A8, [B8], ONE, [ONE], 0, name),
        "scaled_matmul_reduce_scatter": lambda: symm_overlap.scaled_matmul_reduce_scatter(
            A8, B8, ONE, ONE, "sum", 0, name
        ),
        "all_gather": lambda: symm_overlap.all_gather(A, 0, name),
        "reduce_scatter": lambda: symm_overlap.reduce_scatter(A, "sum", 0, name),
        "all_reduce": lambda: torch.ops.symm_overlap.all_reduce(A, "sum", name),
    }
    for path in ("sequential", "pipelined", "c10d"):
        ran[path] = set()
        for op, call in calls.items():
            with recorded() as kinds, symm_overlap.force_path(path):
                call()
            if kinds:
                ran[path].add(op)
    return ran


def test_a_path_that_is_forced_is_the_one_that_runs(ranks: Pool) -> None:
    """On CPU, the sequential path's plain collective is a plan too. On c10d, no op runs a plan in shared memory."""
    for ran in ranks.run(2, plans_run):
        assert ran == {"sequential": set(OPS), "pipelined": set(OPS), "c10d": set()}


SHAPES = [(1, 1, 1), (300, 6, 8), (513, 6, 8), (1024, 12, 4)]  # rows per rank, columns per rank, contracted size


def calls_of(me: Rank, rows: int, columns: int, inner: int) -> dict[tuple[object, ...], Callable[[], object]]:
    """Return a call of every op, keyed by the arguments with which `explain` describes it."""
    name, rank, w, ops = me.group_name, me.rank, me.world, torch.ops.symm_overlap
    x, weight, wide = torch.ones(rows, inner), torch.ones(inner, columns), torch.ones(inner, columns * w)
    tall, deep = torch.ones(rows * w, inner), torch.ones(inner * w, columns)
    gather, scatter = ops.fused_all_gather_matmul, ops.fused_matmul_reduce_scatter
    scaled_gather, scaled_scatter = symm_overlap.all_gather_scaled_matmul, symm_overlap.scaled_matmul_reduce_scatter
    x8, weight8, wide8, tall8 = (tensor.to(torch.float8_e4m3fn) for tensor in (x, weight, wide, tall))
    return {
        ("all_gather_matmul", rows * w, 2 * columns, inner, False): lambda: gather(x, [weight, weight], 0, name),
        ("all_gather_matmul", rows, columns, inner * w, True): lambda: gather(x, [deep], 1, name, return_A=False),
        ("matmul_reduce_scatter", rows * w, columns, inner, False): lambda: scatter(tall, weight, "sum", 0, name),
        ("matmul_reduce_scatter", rows, columns * w, inner, True): lambda: scatter(x, wide, "avg", 1, name),
        ("all_gather_scaled_matmul", rows * w, 2 * columns, inner, False): lambda: scaled_gather(
            x8, [weight8, weight8], ONE, [ONE, ONE], 0, name
        ),
        ("scaled_matmul_reduce_scatter", rows * w, columns, inner, False): lambda: scaled_scatter(
            tall8, weight8, ONE, ONE, "sum", 0, name
        ),
        ("scaled_matmul_reduce_scatter", rows, columns * w, inner, True): lambda: scaled_scatter(
            x8, wide8, ONE, ONE, "avg", 1, name
        ),
        ("scaled_matmul_reduce_scatter", rows * w, columns, 2 * inner, False): lambda: (
            ops.fused_scaled_matmuls_reduce_scatter(
                *([tall8] * 2, [weight8] * 2, [ONE] * 2, [ONE] * 2, [None] * 2, [None] * 2, None),
                *("sum", 0, name, torch.bfloat16, [False] * 2),
            )
        ),
        ("matmul_all_reduce", rows, columns, inner, False): lambda: ops.fused_matmul_all_reduce(x, weight, "sum", name),
        ("all_gather_weight_matmul", rows * w, inner, 0, False): lambda: ops.fused_all_gather_weight_matmul(
            torch.ones(rank + 1, inner), x, 0, True, name
        ),
        ("all_gather_weight_matmul", rows, inner * w, 0, True): lambda: ops.fused_all_gather_weight_matmul(
            torch.ones(rank + 1, inner * w), x, 1, True, name
        ),
        ("weight_grad_reduce_scatter", rows * w, inner, 0, False): lambda: ops.weight_grad_reduce_scatter(
            torch.ones(rank + 1, rows * w), torch.ones(rank + 1, inner), "sum", 0, name
        ),
        ("weight_grad_reduce_scatter", rows, inner * w, 0, True): lambda: ops.weight_grad_reduce_scatter(
            torch.ones(rank + 1, rows), torch.ones(rank + 1, inner * w), "avg", 1, name
        ),
        ("all_gather", rows * w, inner, 0, False): lambda: ops.all_gather(x, 0, name),
        ("all_gather", rows, inner * w, 0, True): lambda: ops.all_gather(x, 1, name),
        ("reduce_scatter", rows * w, inner, 0, False): lambda: ops.reduce_scatter(tall, "sum", 0, name),
        ("reduce_scatter", inner, rows * w, 0, True): lambda: ops.reduce_scatter(tall.t(), "sum", 1, name),
        ("all_reduce", rows, inner, 0, False): lambda: ops.all_reduce(x, "sum", name),
    }


def grid(me: Rank) -> dict[tuple[object, ...], Choice]:
    """Return the choice of every op for every shape."""
    found: dict[tuple[object, ...], Choice] = {}
    for shape in SHAPES:
        for arguments, call in calls_of(me, *shape).items():
            with choices() as made:
                call()
            assert [op for op, _ in made] == [arguments[0]]
            found[arguments] = made[0][1]
    return found


@pytest.mark.parametrize("forced", [None, "sequential", "pipelined", "c10d"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_explain_tells_what_every_rank_does(ranks: Pool, world: int, forced: str | None) -> None:
    """`explain` returns the choice that every rank makes in a real call."""
    with force_path(forced):
        for found in ranks.run(world, grid_on_path, forced):
            for (op, m, n, k, last_dim), choice in found.items():
                told = explain(
                    op,
                    m=m,
                    n=n,
                    k=k,
                    dtype=torch.float32,
                    world=world,
                    device="cpu",
                    direct=forced != "c10d",
                    last_dim=last_dim,
                )
                assert choice == told, (op, m, n, k, last_dim)


def sizes_of_calls(me: Rank) -> list[list[tuple[object, ...]]]:
    """Return the sizes that the chooser sees for a gather of columns, and for a scaled matmul of gathered columns."""
    A, B = torch.ones(4, 6).to(torch.float8_e4m3fn), torch.ones(6 * me.world, 5).to(torch.float8_e4m3fn)
    told: list[list[tuple[object, ...]]] = []
    original = Call.__init__

    def noting(self: Call, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        problem = self.problem
        told[-1].append((problem.op, problem.m, problem.n, problem.k, problem.rows, problem.nbytes))

    with mock.patch.object(Call, "__init__", noting):
        told.append([])
        symm_overlap.all_gather(A.float(), 1, me.group)
        told.append([])
        symm_overlap.all_gather_scaled_matmul(A, [B], ONE, [ONE], 1, me.group)
    return told


def test_a_scaled_matmul_of_gathered_columns_is_a_gather_to_the_chooser(ranks: Pool) -> None:
    """Nothing is multiplied before all columns have arrived, so no matmul can hide the gather."""
    for (plain,), (scaled,) in ranks.run(2, sizes_of_calls):
        assert scaled[:5] == plain[:5]
        assert scaled[5] * 4 == plain[5]  # bytes of float8, and of float32


def grid_on_path(me: Rank, path: str | None) -> dict[tuple[object, ...], Choice]:
    with force_path(path):
        return grid(me)


def choices_without_a_kernel(me: Rank) -> list[tuple[str, str]]:
    name, ops, x = me.group_name, torch.ops.symm_overlap, torch.ones(4, 4)
    tall, sums = torch.ones(4 * me.world, 4), [torch.ones(4 * me.world, 2)]
    x8, tall8 = x.to(torch.float8_e4m3fn), tall.to(torch.float8_e4m3fn)
    with choices() as made, force_path("fused"):
        ops.all_gather_weight_grad(x, sums, 0, name)
        ops.fused_matmuls_reduce_scatter([tall, tall], [x, x], None, "sum", 0, name)
        ops.fused_matmuls_all_reduce([tall, tall], [x, x], None, "sum", name)
        symm_overlap.all_gather_weight_matmul(tall, torch.ones(4, 2), 1, name)
        ops.fused_scaled_matmuls_reduce_scatter(
            *([tall8] * 2, [x8] * 2, [ONE] * 2, [ONE] * 2, [None] * 2, [None] * 2, None),
            *("sum", 0, name, torch.bfloat16, [False] * 2),
        )
    return [(op, choice.path) for op, choice in made]


def test_what_no_kernel_computes_is_pipelined_though_one_kernel_is_forced(ranks: Pool) -> None:
    for made in ranks.run(2, choices_without_a_kernel):
        assert [path for _, path in made] == ["pipelined"] * 5, made
