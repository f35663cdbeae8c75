"""A step touches only the memory that its plan declares for it, in every op, on every path, forward and backward.

`symm_overlap.plan.verify` proves plans from their declared accesses. These tests run the steps and compare the real
accesses with the declared ones. The path c10d is not tested, because it runs no plan.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from threading import Lock
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

import symm_overlap
from symm_overlap.collective.exchange.planned import reduction
from symm_overlap.collective.parts.scattered import ScatteredProducts
from symm_overlap.plan import Plan, Step, Table
from symm_overlap.settings import transformed
from tests.collective.accesses import Recorder, watching_extension
from tests.collective.scaled_cases import all_ops, rows_can_be_scaled
from tests.collective.weight_cases import WEIGHT_CASES
from tests.ranks import Pool, Rank
from tests.transforms import comparing, in_place

ops = torch.ops.symm_overlap
SCATTER = sys.modules["symm_overlap.collective.ops.matmul_reduce_scatter"]  # as an attribute, this name is a function

# The back end's trait `in_place`, and path, chunks and streams. Every pair of these choices occurs. Of three chunks,
# one is the first, one the last, one neither, and one has fewer rows. So two chunks would show nothing else.
WAYS = [
    *((here, ("sequential", 1, 1)) for here in (True, False)),
    *(
        ((chunks // 2 + streams) % 2 == 0, ("pipelined", chunks, streams))
        for chunks, streams in itertools.product((1, 3), (1, 2))
    ),
]
BATCH, ROWS, K, N = 2, 5, 32, 3  # K is large enough for the sliced matmul; not every number of chunks divides the rows


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def backward(*outputs: Tensor | None) -> None:
    torch.stack([output.float().sum() for output in outputs if output is not None]).sum().backward()


def gather_matmul(me: Rank, dim: int, **options: Any) -> None:
    rows = K * (me.world if dim == 2 else 1)
    A, products = symm_overlap.all_gather_matmul(
        tensor(BATCH, ROWS, K), [tensor(rows, N), tensor(rows, 2)], dim, me.group, **options
    )
    backward(A, *products)


def gather_matmul_half(me: Rank) -> None:
    """Sums over ranks are kept in float32."""
    dtype = torch.bfloat16
    A, B = tensor(ROWS, K, dtype=dtype), tensor(K * me.world, N, dtype=dtype)
    backward(*symm_overlap.all_gather_matmul(A, [B], 1, me.group, return_A=False)[1])
    backward(*symm_overlap.all_gather_matmul(A, [B[:K]], 0, me.group, return_A=False)[1])


def gather_matmul_symmetric(me: Rank) -> None:
    A = symm_mem.empty(ROWS, K, dtype=torch.float32, device="cpu").fill_(1)
    symm_mem.rendezvous(A, me.group_name)
    for dim, return_A in ((0, False), (0, True), (1, False)):
        ops.fused_all_gather_matmul(
            A, [torch.ones(K * (me.world if dim else 1), N)], dim, me.group_name, return_A=return_A
        )
    ops.all_gather(A, 0, me.group_name)


def matmul_scatter(me: Rank, dim: int) -> None:
    shape, columns = [BATCH, ROWS, K], N * (me.world if dim == 2 else 1)
    if dim < 2:
        shape[dim] *= me.world
    backward(symm_overlap.matmul_reduce_scatter(tensor(*shape), tensor(K, columns), "avg", dim, me.group))


def matmuls_scatter(me: Rank, dim: int, addend: bool) -> None:
    shape, columns = [BATCH, ROWS, K], N * (me.world if dim == 2 else 1)
    if dim < 2:
        shape[dim] *= me.world
    As, Bs = [tensor(*shape), tensor(*shape)], [tensor(K, columns), tensor(K, columns)]
    extra = tensor(*shape[:2], columns) if addend else None
    backward(ops.fused_matmuls_reduce_scatter(As, Bs, extra, "sum", dim, me.group_name))


def matmul_reduce(me: Rank, rows: int) -> None:
    A, B = tensor(rows, K), tensor(K, N)
    backward(symm_overlap.matmul_all_reduce(A, B, "sum", me.group))
    backward(ops.fused_matmuls_all_reduce([A, A], [B, B], tensor(rows, N), "sum", me.group_name))


def weight_grad(me: Rank, dim: int) -> None:
    lead = [BATCH, ROWS]
    if dim < 2:
        lead[dim] *= me.world
    grads = [tensor(*lead, N), tensor(*lead, 2)]
    backward(*ops.all_gather_weight_grad(tensor(BATCH, ROWS, K), grads, dim, me.group_name))


def copies(me: Rank, dim: int) -> None:
    shape = [BATCH, ROWS, K]
    backward(symm_overlap.all_gather(tensor(*shape), dim, me.group))
    shape[dim] *= me.world
    backward(symm_overlap.reduce_scatter(tensor(*shape), "sum", dim, me.group))
    backward(symm_overlap.all_reduce(tensor(*shape), "avg", me.group))


CASES: dict[str, Callable[[Rank], None]] = {
    **{
        f"all_gather_matmul dim {dim} return_A={keep} save={save}": (
            lambda me, dim=dim, keep=keep, save=save: gather_matmul(me, dim, return_A=keep, save=save)
        )
        for dim in range(3)
        for keep, save in ((True, None), (False, None), (True, "shard"))
    },
    "all_gather_matmul bfloat16": gather_matmul_half,
    "all_gather_matmul symmetric input": gather_matmul_symmetric,
    **{f"matmul_reduce_scatter dim {dim}": lambda me, dim=dim: matmul_scatter(me, dim) for dim in range(3)},
    **{
        f"matmuls_reduce_scatter dim {dim} addend={addend}": (
            lambda me, dim=dim, addend=addend: matmuls_scatter(me, dim, addend)
        )
        for dim in range(3)
        for addend in (True, False)
    },
    **{f"matmul_all_reduce of {rows} rows": lambda me, rows=rows: matmul_reduce(me, rows) for rows in (1, 7)},
    **{f"all_gather_weight_grad dim {dim}": lambda me, dim=dim: weight_grad(me, dim) for dim in range(3)},
    **WEIGHT_CASES,
    **{
        f"scaled matmuls dim {dim} rows={rows}": lambda me, dim=dim, rows=rows: all_ops(me, dim, (BATCH, ROWS), rows)
        for dim in range(3)
        for rows in ((True, False) if rows_can_be_scaled() else (False,))
    },
    **{f"ops without a matmul, dim {dim}": lambda me, dim=dim: copies(me, dim) for dim in range(3)},
}


@contextmanager
def recording(way: tuple[str, int, int], *plants: Callable[[Plan, Table], Table]) -> Iterator[Recorder]:
    path, chunks, streams = way
    recorder = Recorder()
    with (
        comparing(False),
        watching_extension(),
        symm_overlap.force_path(path, chunks=chunks, streams=streams),
        transformed(*plants, recorder),
    ):
        yield recorder


def problems(me: Rank, case: str) -> list[str]:
    found = []
    for here, way in WAYS:
        with in_place(here), recording(way) as recorder:
            CASES[case](me)
            assert recorder.runs, "no plan has run"
            found += [f"{way}, in_place={here}: {problem}" for problem in recorder.problems()]
    return found


# With one peer, there is one pull and one partial result to add. Each kind of plan runs once with one peer.
WITH_ONE_PEER = [
    "all_gather_matmul dim 0 return_A=True save=None",
    "matmul_reduce_scatter dim 1",
    "matmul_all_reduce of 7 rows",
    "all_gather_weight_grad dim 0",
]


@pytest.mark.parametrize(("case", "world"), [*((case, 3) for case in CASES), *((case, 2) for case in WITH_ONE_PEER)])
def test_steps_touch_only_what_their_plan_declares_and_orders(ranks: Pool, case: str, world: int) -> None:
    for found in ranks.run(world, problems, case):
        assert not found, "\n".join(found)


# --- planted errors, which must be found


class CopiesInTheFirstStep(ScatteredProducts):
    """An error: the step that first needs a non-contiguous part copies it and keeps the copy for later pieces.

    The copy belongs to that step's stream, but another stream may run the next piece.
    """

    def __init__(self, backend: Any, As: Any, Bs: Any, biases: Any, addend: Any, scatter_dim: int, *rest: Any) -> None:
        super().__init__(backend, As, Bs, biases, addend, scatter_dim, *rest)
        world = rest[0]
        size = As[0].shape[scatter_dim] // world

        @lru_cache(maxsize=2)
        def part_of(owner: int) -> Tensor:
            part: Tensor = As[0].narrow(scatter_dim, owner * size, size)
            return part.reshape(-1, part.shape[-1])

        self.part_of = part_of
        self.making = Lock()

    def part(self, owner: int, start: int, out: Tensor) -> None:
        with self.making:  # without the lock, two streams could make a copy each and share none
            part = self.part_of(owner)
        self.backend.multiply(part[start : start + out.shape[0]], self.Bs[0], out)


def with_copies_in_steps(me: Rank, way: tuple[str, int, int], dim: int) -> list[str]:
    with (
        mock.patch.object(SCATTER, "ScatteredProducts", CopiesInTheFirstStep),
        recording(way) as recorder,
        torch.no_grad(),
    ):
        shape = [BATCH, ROWS, K]
        shape[dim] *= me.world
        symm_overlap.matmul_reduce_scatter(torch.ones(shape), torch.ones(K, N), "sum", dim, me.group)
        return recorder.problems()


def test_a_copy_that_a_step_makes_and_keeps_for_another_stream_is_found(ranks: Pool) -> None:
    for found in ranks.run(2, with_copies_in_steps, ("pipelined", 2, 2), 1):
        text = "\n".join(found)
        assert "touches memory that was made inside produce chunk" in text
        assert "unordered" in text
        assert "undeclared" in text


def test_a_copy_that_a_step_keeps_for_its_own_stream_is_found_too(ranks: Pool) -> None:
    for found in ranks.run(2, with_copies_in_steps, ("pipelined", 2, 1), 1):
        assert "touches memory that was made inside produce chunk" in "\n".join(found)
        assert "unordered" not in "\n".join(found)


def test_a_part_that_needs_no_copy_is_no_finding(ranks: Pool) -> None:
    assert ranks.run(2, with_copies_in_steps, ("pipelined", 2, 2), 0) == [[], []]


def with_a_scratch_tensor(me: Rank, streams: int) -> list[str]:
    """An error: every matmul writes to a tensor that the plan does not declare."""
    scratch = torch.zeros(4)

    def plant(plan: Plan, table: Table) -> Table:
        def produce(step: Step) -> None:
            scratch.add_(1)
            table["produce"](step)

        return {**table, "produce": produce}

    with recording(("pipelined", 1, streams), plant) as recorder, torch.no_grad():
        ops.fused_matmul_reduce_scatter(torch.ones(2 * me.world, K), torch.ones(K, N), "sum", 0, me.group_name)
        return recorder.problems()


def test_a_write_that_is_not_declared_is_found(ranks: Pool) -> None:
    for found in ranks.run(2, with_a_scratch_tensor, 1):
        assert [line.rpartition(": ")[2] for line in found] == ["undeclared"]
        assert "produce chunk" in found[0]
        assert "aten::add_" in found[0]


def test_writes_of_two_streams_that_nothing_orders_are_found(ranks: Pool) -> None:
    for found in ranks.run(2, with_a_scratch_tensor, 2):
        assert {line.rpartition(": ")[2] for line in found} == {"undeclared", "unordered"}


def without_dependencies(me: Rank) -> list[str]:
    """An error: the sum does not wait for the copies that bring its inputs."""

    def planner(*args: Any, **kwargs: Any) -> Plan:
        plan = planned_reduce_scatter(*args, **kwargs)
        return replace(
            plan, steps=tuple(replace(step, after=(0,)) if step.kind == "reduce" else step for step in plan.steps)
        )

    planned_reduce_scatter = reduction.produce_reduce_scatter
    with (
        in_place(False),
        mock.patch.object(reduction, "produce_reduce_scatter", planner),
        recording(("pipelined", 1, 2)) as recorder,
        torch.no_grad(),
    ):
        ops.fused_matmul_reduce_scatter(torch.ones(2 * me.world, K), torch.ones(K, N), "sum", 0, me.group_name)
        return recorder.problems()


def test_a_read_that_nothing_orders_behind_its_write_is_found(ranks: Pool) -> None:
    for found in ranks.run(2, without_dependencies):
        assert {line.rpartition(": ")[2] for line in found} == {"unordered"}
        assert "pull chunk" in found[0]
        assert "reduce chunk" in found[0]
