"""The plan of torch's published algorithm is correct, and some of its barriers are redundant. Without the barriers
between calls, it has data races.
"""

import pytest

from symm_overlap.collective.planners.published import torch_all_gather_matmul, torch_matmul_reduce_scatter
from symm_overlap.plan import plan_calls, verify, verify_planner
from symm_overlap.plan.testing import redundant

from .cases import contracts_of


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_all_gather_holds_and_one_of_its_three_barriers_is_redundant(world):
    calls = plan_calls(torch_all_gather_matmul, world)
    verify(calls, contracts=contracts_of(calls)).raise_for_problems()
    assert [each.at[0].step.label for each in redundant(calls)] == ["[workspace free]", "[all read]"]
    verify_planner(torch_all_gather_matmul, world, first=False).raise_for_problems()
    verify_planner(torch_all_gather_matmul, world, last=False).raise_for_problems()


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_reduce_scatter_holds_and_four_of_its_barriers_are_redundant(world):
    calls = plan_calls(torch_matmul_reduce_scatter, world)
    verify(calls, contracts=contracts_of(calls)).raise_for_problems()
    assert sum(step.kind == "barrier" for step in calls[0][0].steps) == 2 * (world - 1) + 2
    found = {each.at[0].step.label for each in redundant(calls, [0])}
    assert found == {
        "[workspace free]",
        "[all read]",
        *(f"[pulled {step}]" for step in (world - 2, world - 1) if step > 0),
    }


def test_all_gather_without_a_barrier_between_calls_is_refused_and_the_pair_is_named():
    report = verify_planner(torch_all_gather_matmul, 4, first=False, last=False)
    races = [problem for problem in report.problems if problem.kind == "data race"]
    assert races
    for race in races:
        pull, publish = race.steps
        assert (pull.step.kind, publish.step.kind) == ("pull", "publish")
        assert publish.call == pull.call + 1
        assert publish.rank == pull.step.peer
    with pytest.raises(ValueError, match=r"data race(.|\n)*pull chunk 1.0(.|\n)*publish chunk 1.0"):
        report.raise_for_problems()


def test_reduce_scatter_without_a_barrier_between_calls_is_refused_and_the_pair_is_named():
    report = verify_planner(torch_matmul_reduce_scatter, 4, first=False, last=False, pulled=False)
    pairs = {tuple((at.step.kind, at.call) for at in problem.steps) for problem in report.problems}
    assert (("pull", 0), ("produce", 1)) in pairs
