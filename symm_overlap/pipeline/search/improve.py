"""Make a schedule better by small changes, by late acceptance hill climbing (Burke and Bykov, 2008).

A change is accepted if the schedule is not worse than the present one, or than the one so many changes ago. So it may
become a little worse on the way, and there is no temperature to choose.
"""

from __future__ import annotations

from random import Random

from ..activations import fits
from .candidate import Budget, Candidate, Measured
from .moves import arcs, propose

MEMORY = 60
"""How many changes ago."""
WEIGHT = 0.05
"""Of the mean time at which actions end, beside the makespan."""

PATIENCE = 40
"""So many changes in a row that cannot be end the search: there is hardly a neighbour."""


def improve(start: Measured, budget: Budget, steps: int, random: Random) -> Measured:
    """The best schedule found with at most so many simulations; only those within the cap are looked at."""
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
    """What is made smaller: the makespan, and a little of the mean time at which actions end.

    Many schedules have one makespan. Of these, those that do things earlier are nearer to a shorter one.
    """
    ends = measured.result.times.ends
    return measured.makespan + WEIGHT * sum(ends) / max(1, len(ends))


def shortest(candidate: Candidate) -> float:
    """No schedule of these stages is shorter: what the busiest rank computes, and the way of an input to it."""
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
    """Whether the activations of every rank fit the cap, as they did before its change."""
    return all(
        row is old or fits(candidate.activations.peak(row, candidate.frame.parts), cap)
        for row, old in zip(candidate.rows, before.rows, strict=True)
    )
