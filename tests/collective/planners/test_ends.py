"""The two ends of a plan stand for the caller. They cannot make up for steps that are missing."""

from dataclasses import replace

import pytest

from symm_overlap.plan import Step, plan_calls, verify

from .cases import OVERLAPPED


def with_other_steps(calls, change):
    return [[replace(plan, steps=tuple(map(change, plan.steps))) for plan in plans] for plans in calls]


@pytest.mark.parametrize("planner", OVERLAPPED)
def test_plans_that_compute_nothing_do_not_hold(planner):
    """Even if their ends say that the caller has written the outputs before, or does not read them."""
    calls = plan_calls(planner, 2)
    outputs = {region for plan in calls[0] for region in plan.steps[-1].reads}

    def written_before(step):
        idle = step.kind not in ("fork", "join") and outputs.intersection(step.writes)
        given = replace(step, writes=step.writes + tuple(each for each in outputs)) if step.kind == "fork" else step
        return Step("sleep", step.stream, after=step.after) if idle else given

    def not_read(step):
        step = written_before(step) if step.kind != "fork" else step
        return replace(step, reads=()) if step.kind == "join" else step

    for change in (written_before, not_read):
        kinds = {problem.kind for problem in verify(with_other_steps(calls, change)).problems}
        assert kinds & {"wrong end", "write beyond an output", "written twice"}, kinds
