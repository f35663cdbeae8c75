"""If all ranks do the same, simulating one rank gives the time of all ranks."""

from __future__ import annotations

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_all_reduce, produce_reduce_scatter
from symm_overlap.collective.planners.published import torch_all_gather_matmul, torch_matmul_reduce_scatter
from symm_overlap.plan import Builder, Life, Plan, Step, plan_calls, simulate
from symm_overlap.plan.one_rank import makespan_of_one_rank

TWO = {"compute": ("compute0", "compute1"), "copy": "copy"}
SMS = frozenset({"consume", "produce", "reduce", "publish", "signal"})
# No two sums of these numbers are equal, so no lottery decides between steps that are ready at the same time.
COSTS = {
    "consume": (1.013, 0.307),
    "produce": (1.017, 0.311),
    "reduce": (0.211, 0.0),
    "publish": (0.103, 0.0),
    "pull": (0.713, 0.0),
    "signal": (0.0107, 0.0),
    "wait": (0.0113, 0.0),
    "barrier": (0.0131, 0.0),
    "sleep": (0.0019, 0.0),
}


def costs(rank: int, step: Step) -> tuple[float, float]:
    return COSTS.get(step.kind, (0.0, 0.0))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("copies", ["fast", "slow"])
def test_it_takes_as_long_as_all_ranks_do(world: int, copies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`makespan_of_one_rank`, which simulates one rank, returns the same time as a simulation of all ranks."""
    monkeypatch.setitem(COSTS, "pull", (0.713 if copies == "fast" else 2.9, 0.0))
    cases = [(planner, {}) for planner in (torch_all_gather_matmul, torch_matmul_reduce_scatter)]
    for chunks in (1, 2):
        cases.append((all_gather_consume, {"chunks": chunks, "outbound": "compute0", **TWO}))
        cases.append((all_gather_consume, {"chunks": chunks, "outbound": "compute0", "ring": 2, **TWO}))
        cases += [(planner, {"chunks": chunks, **TWO}) for planner in (produce_reduce_scatter, produce_all_reduce)]
    for planner, how in cases:
        alone = makespan_of_one_rank(planner(0, world, **how), costs, on_sms=SMS)
        timelines = [simulate(plan_calls(planner, world, 1, **how), costs, on_sms=SMS, seed=seed) for seed in (0, 1)]
        assert alone == pytest.approx(min(each.makespan for each in timelines)), (planner.__name__, how)


def test_any_rank_stands_for_all() -> None:
    """The simulated time is the same whichever rank is simulated."""
    found = {
        round(makespan_of_one_rank(produce_reduce_scatter(rank, 5, **TWO), costs, on_sms=SMS), 9) for rank in range(5)
    }
    assert len(found) == 1


def chain(posts: bool = True) -> Plan:
    """Three steps on one stream: compute, signal, wait."""
    plan = Builder("chain", 0, 2, stream="s", buffers={"x": Life.PERSISTENT}, inputs={})
    plan.add("consume", "s", writes=[plan.here("x", 0)])
    if posts:
        plan.add("signal", "s", peers=(1,), channel=0)
    plan.add("wait", "s", peers=(1,), channel=0)
    return plan.finish()


def test_no_step_starts_before_the_host_has_issued_it() -> None:
    work = 1.013 + 0.307 + 0.0107 + 0.0113
    assert makespan_of_one_rank(chain(), costs, on_sms=SMS) == pytest.approx(work)
    # The compute is the second operation that the host issues. From then on, the host is ahead of the device.
    assert makespan_of_one_rank(chain(), costs, on_sms=SMS, host=[0.01] * 5) == pytest.approx(0.02 + work)
    # A slow host issues five steps. The last step takes no time.
    assert makespan_of_one_rank(chain(), costs, on_sms=SMS, host=[10.0] * 5) == pytest.approx(50.0)


def test_a_signal_is_under_way_and_holds_up_who_waits_for_it_and_nobody_else() -> None:
    """The time that a signal is in flight delays only the wait for it."""
    work = 1.013 + 0.307 + 0.0107 + 0.0113
    assert makespan_of_one_rank(chain(), costs, on_sms=SMS, flight=0.5) == pytest.approx(work + 0.5)
    plan = Builder("chain", 0, 2, stream="s", buffers={"x": Life.PERSISTENT}, inputs={})
    plan.add("signal", "s", peers=(1,), channel=0)
    plan.add("consume", "s", writes=[plan.here("x", 0)])
    plan.add("wait", "s", peers=(1,), channel=0)
    assert makespan_of_one_rank(plan.finish(), costs, on_sms=SMS, flight=0.5) == pytest.approx(work), (
        "it has come long ago"
    )


def test_a_wait_for_a_signal_that_nobody_gives_is_a_deadlock() -> None:
    with pytest.raises(ValueError, match="the plan of chain deadlocks"):
        makespan_of_one_rank(chain(posts=False), costs, on_sms=SMS)
