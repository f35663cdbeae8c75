"""What tests of simulated plans have in common: costs, seeds, and what they ask of a timeline."""

from symm_overlap.plan import Costs, Plan

TWO = ("compute0", "compute1")
WORLD = 4
COSTS = Costs(produce=1.0, consume=1.0, tail=0.25, copy=0.3, latency=0.01, sleep=0.001)
SEEDS = range(12)


def first_streams(timeline, kind="produce"):
    """On each rank, the stream of the first kernel of a kind to start."""
    first = {}
    for event in timeline.events:
        if event.at.step.kind == kind:
            first.setdefault(event.at.rank, event.at.step.stream)
    return [first[rank] for rank in range(len(first))]


def waited_at_barriers(timeline, rank):
    return sum(event.waited for event in timeline.events if event.at.rank == rank and event.at.step.kind == "barrier")


def one_rank(*steps):
    return [[Plan("made_by_hand", 0, 1, 0, steps)]]
