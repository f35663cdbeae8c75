"""Replays of captured calls and other calls may follow each other in any order without a race. `verify` proves this
for plans with the barriers that CudaSignals adds to a captured call, in the workspace halves that a Lane chooses.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, permutations

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_all_reduce, produce_reduce_scatter
from symm_overlap.plan import Plan, Step
from symm_overlap.plan.verify import verify
from tests.runtime.cuda_lane import Gpu, cuda_lane
from tests.runtime.cuda_lane import call as call_on

PLANNERS = [all_gather_consume, produce_reduce_scatter, produce_all_reduce]
WORLD = 3

Calls = list[tuple[int, bool]]
"""(half of the workspace, captured) of calls that run one after another."""

# A graph was captured in half 1. The host does not see its replays, and alternates the halves of the other calls.
CALLS: Calls = [(0, False), (1, True), (1, True), (0, False), (1, True), (1, False), (1, True), (0, False), (1, False)]

# "call": make a call without capture. A number: capture a graph of that many calls, which runs nothing. "replay": run
# the latest graph.
PROGRAMS = [
    "call 1 call",
    "call call 1 call",
    "call 1 call replay call",
    "call 1 replay replay call 1 replay call",
    "call 3 call replay call call replay replay call",
    "3 replay call 2 call replay call 1 call",
    "call 1 1 1 call 1 1 call call",
]


def captured(plan: Plan, before: bool, after: bool) -> Plan:
    """Return the plan with two more barriers: one directly after the fork, and one directly before the join."""
    fork, *steps, join = plan.steps
    stream, channel = fork.stream, 2 if plan.op == "produce_reduce_scatter" else 3
    first = Step("barrier", stream, channel=channel, label="[free]")
    last = Step("barrier", stream, after=tuple(index + before for index in join.after), channel=channel, label="[over]")
    shifted = [replace(step, after=tuple(index + before for index in step.after)) for step in steps]
    ends = [last, replace(join, after=())] if after else [replace(join, after=last.after)]
    return replace(plan, steps=(fork, *([first] if before else []), *shifted, *ends))


def calls_that_run(program: str, gpu: Gpu) -> Calls:
    """Return the calls that a program runs when a Lane chooses the halves."""
    lane, graph, ran = cuda_lane(), Calls(), Calls()

    def call() -> tuple[int, bool]:
        halves: list[int] = []
        call_on(lane, halves.append)
        return halves[0], gpu.capturing

    for action in program.split():
        if action == "replay":
            ran += graph
        elif action == "call":
            ran.append(call())
        else:
            gpu.capturing = True
            graph = [call() for _ in range(int(action))]
            gpu.capturing = False
    return ran


def problems(
    planners: Sequence[Callable[..., Plan]], calls: Calls = CALLS, before: bool = True, after: bool = True
) -> set[str]:
    """Return the kinds of problems that `verify` finds in ``calls``. The planners take turns."""
    plans = []
    for (_, is_captured), planner in zip(calls, cycle(planners), strict=False):
        ranks = [planner(rank, WORLD, compute=("a",), copy="copy") for rank in range(WORLD)]
        plans.append([captured(plan, before, after) for plan in ranks] if is_captured else ranks)
    return {problem.kind for problem in verify(plans, [half for half, _ in calls]).problems}


in_place = partial(all_gather_consume, symmetric=True, announce_offset=False, outbound="a")
"""Peers read the input tensor itself. When the call is over, the caller may change it again."""


@pytest.mark.parametrize(
    "planners",
    [
        *([one] for one in PLANNERS),
        *permutations(PLANNERS),
        *permutations(PLANNERS, 2),
        [in_place],
        [in_place, produce_reduce_scatter],
    ],
)
def test_replays_and_other_calls_may_follow_each_other_in_any_way(planners: Sequence[Callable[..., Plan]]) -> None:
    assert problems(planners) == set()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("planner", PLANNERS)
def test_a_lane_chooses_halves_that_do_not_race(
    planner: Callable[..., Plan], program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_that_run(program, Gpu(monkeypatch))
    assert problems([planner], calls) == set(), f"(half, captured): {calls}"


# The all-reduce is left out: its two exchanges order it relative to another all-reduce even without the barriers.
@pytest.mark.parametrize("planner", [all_gather_consume, produce_reduce_scatter])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_neither_barrier_can_be_left_out(planner: Callable[..., Plan], before: bool, after: bool) -> None:
    assert "data race" in problems([planner], before=before, after=after)
