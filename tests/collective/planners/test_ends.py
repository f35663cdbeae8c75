"""The two ends of a plan stand for the caller. They cannot make up for steps that are missing."""

from dataclasses import replace

import pytest

from symm_overlap.plan import Life, Step, plan_calls, verify

from .cases import OVERLAPPED


def written_before(step, outputs):
    return replace(step, writes=step.writes + outputs) if step.kind == "fork" else step


def not_read(step, outputs):
    return replace(step, reads=()) if step.kind == "join" else step


@pytest.mark.parametrize("change", [written_before, not_read])
@pytest.mark.parametrize("planner", OVERLAPPED)
def test_plans_that_compute_nothing_do_not_hold(planner, change):
    """Even if their ends say that the caller has written the outputs before, or does not read them."""

    def without_work(plan):
        def changed(step):
            computes = step.kind != "fork" and any(plan.buffers[each.buffer] is Life.OUTPUT for each in step.writes)
            return Step("sleep", step.stream, after=step.after) if computes else change(step, plan.steps[-1].reads)

        return replace(plan, steps=tuple(map(changed, plan.steps)))

    calls = [[without_work(plan) for plan in plans] for plans in plan_calls(planner, 2)]
    assert {problem.kind for problem in verify(calls).problems} == {"wrong end"}
