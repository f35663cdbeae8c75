"""Simulate a schedule with costs: how long a step takes, where ranks idle, what delays it, how much memory it needs.

`symm_overlap.pipeline.simulation.work` turns the schedule into work, and the clock of plans (`symm_overlap.plan.work`)
runs that work. If the schedule has only compute actions, sends and receives are added first.
"""

from __future__ import annotations

from ...plan import work as clock
from ..schedule import Schedule
from . import work
from .cost_result import CostResult
from .costs import PipelineCosts
from .encoded import Encoded, encode, with_messages


def simulate_cost(schedule: Schedule | Encoded, costs: PipelineCosts | None = None) -> CostResult:
    """Simulate a schedule on a clock, and return when each action ran and what follows from that.

    Args:
        schedule: a schedule of compute alone, or one with its sends and receives.
        costs: what actions cost. By default every F, I and W takes 1, and messages take no time.

    Returns:
        The times of all actions, from which makespan, bubbles, memory and the critical path are computed.

    Raises:
        ValueError: a rank waits for ever (`verify` says why), the costs are for another number of stages, their sum is
            not finite, or an action is invalid (`encode`).
    """
    costs = PipelineCosts() if costs is None else costs
    encoded = with_messages(schedule if isinstance(schedule, Encoded) else encode(schedule))
    durations = costs.durations(len(encoded.placement))
    given = work.pipeline_work(encoded, durations, costs.overlap, costs.slow_down, costs.one_receive_stream)
    times = clock.run(given)
    if len(times.order) < len(encoded.cells):
        raise ValueError("some rank waits for ever, so there is nothing to measure: `verify` names it")
    return CostResult(encoded, costs, times)
