"""Why CudaSignals puts a captured call between two barriers: proven by `verify`, on plans with those barriers added."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, permutations

import pytest

from symm_overlap.plan import Plan, Step, all_gather_consume, produce_all_reduce, produce_reduce_scatter
from symm_overlap.plan.verify import verify

PLANNERS = [all_gather_consume, produce_reduce_scatter, produce_all_reduce]
WORLD = 3

# (parity, captured) of calls that follow one another. A graph was captured in half 1 of the workspace; the host, which
# does not see its replays, alternates the halves of the other calls.
CALLS = [(0, False), (1, True), (1, True), (0, False), (1, True), (1, False), (1, True), (0, False), (1, False)]


def captured(plan: Plan, before: bool, after: bool) -> Plan:
    """The plan with a barrier between the fork and all else, and one between all else and the join."""
    fork, *steps, join = plan.steps
    stream, channel = fork.stream, 2 if plan.op == "produce_reduce_scatter" else 3
    first = Step("barrier", stream, channel=channel, label="[free]")
    last = Step("barrier", stream, after=tuple(index + before for index in join.after), channel=channel, label="[over]")
    shifted = [replace(step, after=tuple(index + before for index in step.after)) for step in steps]
    ends = [last, replace(join, after=())] if after else [replace(join, after=last.after)]
    return replace(plan, steps=(fork, *([first] if before else []), *shifted, *ends))


def problems(planners: Sequence[Callable[..., Plan]], before: bool, after: bool) -> set[str]:
    """What is wrong with `CALLS`, the planners taking turns."""
    calls = []
    for (parity, is_captured), planner in zip(CALLS, cycle(planners), strict=False):
        plans = [planner(rank, WORLD, compute=("a",), copy="copy", parity=parity) for rank in range(WORLD)]
        calls.append([captured(plan, before, after) for plan in plans] if is_captured else plans)
    return {problem.kind for problem in verify(calls).problems}


@pytest.mark.parametrize(
    "planners", [*([one] for one in PLANNERS), *permutations(PLANNERS), *permutations(PLANNERS, 2)]
)
def test_replays_and_other_calls_may_follow_each_other_in_any_way(planners: Sequence[Callable[..., Plan]]) -> None:
    assert problems(planners, before=True, after=True) == set()


# Not for the all-reduce, whose two exchanges would keep it apart from another all-reduce.
@pytest.mark.parametrize("planner", [all_gather_consume, produce_reduce_scatter])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_neither_barrier_can_be_left_out(planner: Callable[..., Plan], before: bool, after: bool) -> None:
    assert "data race" in problems([planner], before, after)
