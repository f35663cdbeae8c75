"""The name of a step's range in a trace says which step it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from symm_overlap.collective import planners
from symm_overlap.collective.planners.published import torch_all_gather_matmul, torch_matmul_reduce_scatter
from symm_overlap.plan import Plan, kind
from symm_overlap.plan.ranges import call_of, range_of, range_of_call, step_of

TWO = {"chunks": 2, "compute": ("compute0", "compute1"), "copy": "copy", "copies": 2}
PLANS: dict[str, Callable[[int], Plan]] = {
    "gather": lambda rank: planners.all_gather_consume(rank, 4, **TWO),
    "gather in place": lambda rank: planners.all_gather_consume(rank, 4, in_place=True),
    "gather whole": lambda rank: planners.gather_then_consume(rank, 4),
    "scatter": lambda rank: planners.produce_reduce_scatter(rank, 4, **TWO),
    "scatter whole": lambda rank: planners.produce_then_reduce_scatter(rank, 4),
    "reduce": lambda rank: planners.produce_all_reduce(rank, 4, **TWO),
    "reduce in one shot": lambda rank: planners.one_shot_all_reduce(rank, 4),
    "fused gather": lambda rank: planners.fused_all_gather_matmul(rank, 4, chunks=2, copies=2),
    "fused reduce": lambda rank: planners.fused_matmul_all_reduce(rank, 4, chunks=2, copies=2),
    "fused scatter": lambda rank: planners.fused_matmul_reduce_scatter(rank, 4, chunks=2, copies=2),
    "torch's gather": lambda rank: torch_all_gather_matmul(rank, 4),
    "torch's scatter": lambda rank: torch_matmul_reduce_scatter(rank, 4),
}


@pytest.mark.parametrize("plan", PLANS)
def test_the_step_is_read_from_the_name_of_its_range(plan: str) -> None:
    for rank in range(4):
        for step in PLANS[plan](rank).steps:
            read = step_of(range_of(step))
            assert read is not None, step
            assert str(read) == str(step)
            peers = step.peers if read.peers else ()  # the text of a barrier or a copy does not name them
            assert read == replace(step, reads=(), writes=(), after=(), peers=peers)


@pytest.mark.parametrize("plan", PLANS)
def test_no_two_steps_that_copy_or_compute_have_one_name(plan: str) -> None:
    """A reader of a trace puts all activities of one name together."""
    names = [range_of(step) for step in PLANS[plan](0).steps if kind(step.kind).role in ("copy", "compute")]
    assert len(names) == len(set(names))


def test_a_call_is_read_from_the_name_of_its_range() -> None:
    name = range_of_call("an op; with (1, 2)", "cuda", 3, 8, path="fused", chunks=2)
    assert call_of(name) == (
        "an op; with (1, 2)",
        {"device": "cuda", "rank": "3", "world": "8", "path": "fused", "chunks": "2"},
    )
    for other in ("", "an op; device=cuda", "symm_overlap call: an op", "symm_overlap step: a; b=c"):
        assert call_of(other) is None


@pytest.mark.parametrize("name", ["", "aten::mm", "pull chunk 1.0 on copy", "symm_overlap step: ", "symm_overlap step"])
def test_other_names_are_not_steps(name: str) -> None:
    assert step_of(name) is None
