"""What tests of simulated plans have in common: costs, seeds, and what they ask of a timeline."""

import symm_overlap.collective.planners.kinds  # noqa: F401 (plans made by hand have steps of these kinds)
from symm_overlap.plan import Costs, Life, Plan

TWO = ("compute0", "compute1")
WORLD = 4
COSTS = Costs(compute=1.0, tail=0.25, copy=0.3, meet=0.01, sleep=0.001)
SEEDS = range(12)
COMPUTES = frozenset({"produce", "consume", "reduce"})


def first_streams(timeline, kind="produce"):
    """On each rank, the stream of the first kernel of a kind to start."""
    first = {}
    for event in timeline.events:
        if event.at.step.kind == kind:
            first.setdefault(event.at.rank, event.at.step.stream)
    return [first[rank] for rank in range(len(first))]


def waited_at_barriers(timeline, rank):
    return sum(event.waited for event in timeline.events if event.at.rank == rank and event.at.step.kind == "barrier")


def by_hand(rank, world, *steps, **lives):
    """A plan whose buffers live as ``lives`` says, and those that it does not name outlive the call."""
    named = {region.buffer for step in steps for region in step.reads + step.writes}
    return Plan("made_by_hand", rank, world, steps, {name: lives.get(name, Life.PERSISTENT) for name in sorted(named)})


def one_rank(*steps, **lives):
    return [[by_hand(0, 1, *steps, **lives)]]
