"""A step is run by its chunk, its peers and its place among others, so a plan in which they say something else than its
regions is rejected if its contract is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from symm_overlap.collective.planners import (
    ALL_GATHER_MATMUL,
    MATMUL_REDUCE_SCATTER,
    all_gather_consume,
    fused_all_gather_matmul,
    fused_matmul_reduce_scatter,
    produce_reduce_scatter,
)
from symm_overlap.plan import Life, Plan, Region, Step, plan_calls

from .cases import contracts_of
from .changes import changed, problem_of


def test_a_matmul_with_another_chunk_than_it_names_is_wrong() -> None:
    (plans,) = plan_calls(all_gather_consume, 2, 1, compute=("one",), copy="one")
    other = changed(plans, 0, lambda step: replace(step, chunk=(0, 0)) if step.kind == "consume" else step)
    assert "it computes chunk 0.0, but reads input@1[0] of call 0" in problem_of(other, ALL_GATHER_MATMUL)
    (plans,) = plan_calls(produce_reduce_scatter, 2, 1)
    other = changed(plans, 1, lambda step: replace(step, chunk=(1, 0)) if step.kind == "produce" else step)
    assert "it computes chunk 1.0, but reads input@1[0] of call 0" in problem_of(other, MATMUL_REDUCE_SCATTER)


@pytest.mark.parametrize("offsets", ["none", "own", "alone", "first"])
def test_a_symmetric_input_is_read_where_its_rank_says_that_it_begins(offsets: str) -> None:
    (plans,) = plan_calls(all_gather_consume, 3, 1, symmetric=True)

    def wrong(step: Step) -> Step:
        if step.kind != "pull":
            return step
        shard, offset = step.reads
        own = offset._replace(rank=0)
        reads = {"none": (shard,), "own": (shard, own), "alone": (offset,), "first": (offset, shard)}
        return replace(step, reads=reads[offsets])

    found = problem_of(changed(plans, 0, wrong), ALL_GATHER_MATMUL)
    assert "it must read where each begins in this call" in found


Changes = Callable[[Step], Step]
RAN_OTHERWISE: dict[str, tuple[Callable[..., Plan], dict[str, Any], Changes, str]] = {
    "a matmul of all chunks": (
        produce_reduce_scatter,
        {},
        lambda step: replace(step, chunk=None) if step.kind == "produce" else step,
        "it computes all chunks, but reads input@0[",
    ),
    "a matmul of regions": (
        all_gather_consume,
        {"span": 2, "compute": ("one",), "copy": "one"},
        lambda step: replace(step, reads=in_units(step.reads)) if step.kind == "consume" else step,
        "a matmul of some chunks reads them first, as one region",
    ),
    "a copy of another piece": (
        all_gather_consume,
        {"chunks": 2},
        lambda step: replace(step, chunk=(step.chunk[0], 0)) if step.kind == "pull" and step.chunk else step,
        "[1] to gathered@0[",
    ),
    "a copy from another peer": (
        produce_reduce_scatter,
        {},
        lambda step: replace(step, peers=(3 - step.peer,)) if step.kind == "pull" else step,
        "it copies from or to rank ",
    ),
    "a copy to two regions": (
        all_gather_consume,
        {},
        lambda step: (
            replace(step, writes=(*step.writes, Region("gathered", 0, 0, 1))) if step.kind == "publish" else step
        ),
        "a copy has one source and one target, and this one has 1 and 2",
    ),
    "a wait for another flag": (
        fused_all_gather_matmul,
        {},
        lambda step: replace(step, chunk=(0, 0)) if step.kind == "raise" and step.chunk == (1, 0) else step,
        "it waits for the flag of another chunk than it names: that of raise chunk 0.0",
    ),
    "a poll of another flag": (
        fused_matmul_reduce_scatter,
        {},
        lambda step: replace(step, chunk=(1, 0)) if step.kind == "poll" else step,
        "it waits for the flag of another chunk than it names: that of tiles chunk ",
    ),
}


def in_units(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    return tuple(each._replace(start=unit, stop=unit + 1) for each in regions for unit in range(each.start, each.stop))


@pytest.mark.parametrize("case", RAN_OTHERWISE)
def test_a_step_that_would_be_run_otherwise_than_its_regions_say_is_wrong(case: str) -> None:
    planner, options, changes, text = RAN_OTHERWISE[case]
    (plans,) = plan_calls(planner, 3, 1, **options)
    assert text in problem_of(changed(plans, 0, changes), *contracts_of([plans]))


def test_a_flag_is_set_once() -> None:
    (plans,) = plan_calls(fused_all_gather_matmul, 3, 1)
    plan = plans[0]
    first = next(index for index, step in enumerate(plan.steps) if step.kind == "wait")
    with_one = [*plan.steps[:first], Step("raise", "copy", chunk=(1, 0), after=(0,)), *plan.steps[first:]]
    moved = [replace(step, after=tuple(each + (each >= first) for each in step.after)) for step in with_one]
    other = [Plan(plan.op, 0, 3, tuple(moved), plan.buffers), *plans[1:]]
    assert "several steps set the flag of this chunk" in problem_of(other, ALL_GATHER_MATMUL)


def test_offsets_hold_for_one_call() -> None:
    (plans,) = plan_calls(all_gather_consume, 2, 1, symmetric=True)
    kept = [replace(plan, buffers={**plan.buffers, "offset": Life.PERSISTENT}) for plan in plans]
    assert "it must read where each begins in this call" in problem_of(kept, ALL_GATHER_MATMUL)
