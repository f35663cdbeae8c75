"""Simulate a schedule with costs: how long a step takes, where ranks idle, what holds it up, how much memory it needs.

The work is that of `symm_overlap.pipeline.work`, the clock that of plans (`symm_overlap.plan.work`). A schedule of
compute alone gets its sends and receives first.
"""

from __future__ import annotations

from .. import _sim
from ..plan import work as clock
from . import work
from .cost_result import CostResult
from .costs import PipelineCosts
from .encoded import Encoded, encode, integers
from .schedule import Schedule


def simulate_cost(schedule: Schedule | Encoded, costs: PipelineCosts | None = None) -> CostResult:
    """Run a schedule on a clock.

    Args:
        schedule: of compute alone, or with its sends and receives.
        costs: by default every F, I and W takes 1, and messages take no time.

    Raises:
        ValueError: some rank waits for ever (`verify` says why), costs for another number of stages, or an action in a
            place where it cannot be.
    """
    costs = PipelineCosts() if costs is None else costs
    encoded = _with_messages(schedule if isinstance(schedule, Encoded) else encode(schedule))
    durations = costs.durations(len(encoded.placement))
    given = work.pipeline_work(encoded, durations, costs.overlap, costs.slow_down, costs.one_receive_stream)
    times = clock.run(given)
    if len(times.order) < len(encoded.cells):
        raise ValueError("some rank waits for ever, so there is nothing to measure: see verify(schedule)")
    return CostResult(encoded, costs, times)


def _with_messages(encoded: Encoded) -> Encoded:
    """The schedule with sends and receives. Where they cannot be put, it has them, or will be found to deadlock."""
    lowered = _sim.add_send_recv(encoded)
    return encoded if lowered is None else encoded._replace(cells=integers(lowered[0]), starts=integers(lowered[1]))
