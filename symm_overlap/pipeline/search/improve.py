"""Improve a schedule by small changes, with late acceptance hill climbing (Burke and Bykov, 2008).

A change is accepted if the schedule is not worse than the current one, or than the one `MEMORY` changes ago. So it may
temporarily become a little worse, and there is no temperature to choose.
"""

from __future__ import annotations

from random import Random

from ..simulation.activations import fits
from .candidate import Budget, Candidate, Measured
from .moves import arcs, propose

MEMORY = 60
"""How many changes late acceptance looks back."""
WEIGHT = 0.05
"""The weight of the mean time at which actions end, relative to the makespan."""

PATIENCE = 40
"""After this many impossible changes in a row for each rank, the search ends: there is hardly a neighbour left."""


def improve(start: Measured, budget: Budget, steps: int, random: Random) -> Measured:
    """Return the best schedule found with at most ``steps`` simulations. Only changes within the cap are simulated."""
    now = best = start
    now_score = score(start)
    history = [now_score] * MEMORY
    path = arcs(now.result)
    until = budget.used + min(steps, budget.left)
    refused = turn = 0
    least = shortest(start.candidate) * (1 + 1e-12)
    while best.makespan > least and budget.used < until and refused < PATIENCE * max(1, len(start.candidate.rows)):
        proposed = propose(now.candidate, path, random)
        measured = budget.measure(proposed) if proposed and _within(proposed, now.candidate, budget.cap) else None
        if measured is None:
            refused += 1
            continue
        refused = 0
        turn += 1
        before = history[turn % MEMORY]
        found = score(measured)
        if found <= max(now_score, before):
            now, now_score = measured, found
            path = arcs(now.result)
            if now.makespan < best.makespan * (1 - 1e-12):
                best = now
        history[turn % MEMORY] = min(before, now_score)
    return best


def score(measured: Measured) -> float:
    """Return what is minimised: the makespan, plus a fraction of the mean time at which actions end.

    Many schedules have the same makespan. Among these, schedules whose actions end earlier are closer to a shorter one.
    """
    ends = measured.result.times.ends
    return measured.makespan + WEIGHT * sum(ends) / max(1, len(ends))


def shortest(candidate: Candidate) -> float:
    """Return a lower bound of the makespan on these stages: the largest, over ranks, of what a rank computes plus the
    time until its first input."""
    costs, placement = candidate.costs, candidate.frame.placement
    stages, pipelines = len(placement), candidate.frame.pipelines
    forward, full = costs.each("forward", stages), costs.each("full_backward", stages)
    halves = zip(costs.each("input_grad", stages), costs.each("weight_grad", stages), strict=True)
    backward = [min(one, sum(two)) for one, two in zip(full, halves, strict=True)]
    share, length = candidate.frame.microbatches // pipelines, stages // pipelines
    found = 0.0
    for rank in range(candidate.frame.ranks):
        mine = [stage for stage in range(stages) if placement[stage] == rank]
        busy = sum(share * (forward[stage] + backward[stage]) for stage in mine) * min(1.0, costs.overlap)
        ways = [sum(forward[stage // length * length : stage]) for stage in mine]
        found = max(found, busy + min(ways, default=0.0))
    return found


def _within(candidate: Candidate, before: Candidate, cap: float) -> bool:
    """True if the activations of every rank fit the cap, given that they fit it in ``before``, before the change."""
    return all(
        row is old or fits(candidate.activations.peak(row, candidate.frame.parts), cap)
        for row, old in zip(candidate.rows, before.rows, strict=True)
    )
