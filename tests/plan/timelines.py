"""Helpers of the tests of plans: costs, seeds, queries of timelines, and plans made by hand."""

import symm_overlap.collective.planners.kinds  # noqa: F401 (plans made by hand have steps of these kinds)
from symm_overlap.plan import Costs, Life, Plan

TWO = ("compute0", "compute1")
WORLD = 4
COSTS = Costs(compute=1.0, tail=0.25, copy=0.3, meet=0.01, sleep=0.001)
SEEDS = range(12)
COMPUTES = frozenset({"produce", "consume", "reduce"})


def first_streams(timeline, kind="produce"):
    """Return, for each rank, the stream on which the first kernel of this kind starts."""
    first = {}
    for event in timeline.events:
        if event.at.step.kind == kind:
            first.setdefault(event.at.rank, event.at.step.stream)
    return [first[rank] for rank in range(len(first))]


def waited_at_barriers(timeline, rank):
    return sum(event.waited for event in timeline.events if event.at.rank == rank and event.at.step.kind == "barrier")


def by_hand(rank, world, *steps, **lives):
    """Return a plan with these steps. ``lives`` is the lifetime of each buffer. Other buffers are persistent."""
    named = {region.buffer for step in steps for region in step.reads + step.writes}
    return Plan("made_by_hand", rank, world, steps, {name: lives.get(name, Life.PERSISTENT) for name in sorted(named)})


def one_rank(*steps, **lives):
    return [[by_hand(0, 1, *steps, **lives)]]
