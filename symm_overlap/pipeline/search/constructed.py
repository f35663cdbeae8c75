"""Search for good policies of the list scheduler, on each placement of stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import NamedTuple

from ..layer_costs import LayerCosts
from ..placement import loop, v
from ..schedule import Schedule
from ..simulation.activations import B, F, I
from ..simulation.encoded import Encoded, encode, parts_of
from .candidate import Budget, Candidate, Measured
from .list_schedule import ListSchedule, Policy
from .starts import candidate_of


class Place(NamedTuple):
    """A placement of stages on ranks, with their costs, and the list scheduler for it."""

    empty: Candidate
    scheduler: ListSchedule


def places(
    ranks: int, microbatches: int, layers: LayerCosts, stages_per_rank: Sequence[int], partition: str, cap: float
) -> Iterator[Place]:
    """Yield every placement that has enough layers.

    With partition "auto", stages here are balanced: the simulator chooses partitions only for handcrafted schedules.
    """
    found = dict.fromkeys(
        (name, placement(ranks, ranks * count))
        for count in stages_per_rank
        for name, placement in (("loop", loop), ("V", v))
        if layers.layers >= ranks * count and not (name == "V" and (count == 1 or ranks == 1))
    )
    for name, placement in found:
        encoded = encode(Schedule(((),) * ranks, placement, microbatches))
        empty = candidate_of(f"search, {name}", encoded, layers, "even" if partition == "even" else "balanced")
        yield Place(empty, ListSchedule(ranks, placement, microbatches, empty.costs, cap))


def policies(ranks: int) -> Iterator[Policy]:
    """Yield the policies to begin with."""
    falling = tuple((ranks - rank) / (2 * ranks) for rank in range(ranks))
    for shares, split, forwards_first in product(((1.0,) * ranks, falling), (True, False), (False, True)):
        for late_stages_first in (True, False):
            yield Policy(shares, forwards_first, late_stages_first, split=split)


def construct(
    place: Place, starts: Sequence[Measured], budget: Budget, steps: int, random: Random
) -> list[tuple[Measured, Policy]]:
    """Try policies on a placement. Return the schedules and their policies, the fastest first.

    At least one policy is tried. Some follow the order of one of ``starts`` on the same placement, and so adapt that
    schedule to the cap.
    """
    found: list[tuple[Measured, Policy]] = []
    until = budget.used + max(1, min(steps, budget.left))

    def attempt(policy: Policy) -> None:
        encoded = place.scheduler.run(policy)
        measured = budget.measure(_candidate(place.empty, encoded)) if encoded else None
        if measured:
            found.append((measured, policy))

    same = [start for start in starts if tuple(start.candidate.frame.placement) == place.scheduler.placement]
    for policy in (*policies(place.scheduler.ranks), *following(same, place.scheduler.ranks)):
        if budget.used < until:
            attempt(policy)
    while found and budget.used < until:
        found.sort(key=lambda each: each[0].makespan)
        del found[4:]
        policy = random.choice(found)[1]
        attempt(policy.changed(random, len(place.scheduler.placement), place.scheduler.unit))
    found.sort(key=lambda each: each[0].makespan)
    return found


def following(starts: Sequence[Measured], ranks: int) -> Iterator[Policy]:
    """Yield policies that follow the order of other schedules. Only schedules of a single pipeline are used."""
    for start in starts:
        encoded, times = start.result.encoded, start.result.times.starts
        order = {
            (kind == F, stage, microbatch): time
            for code, time in zip(encoded.cells, times, strict=True)
            for kind, stage, microbatch in parts_of(code, encoded.parts)
            if kind in (F, I, B)
        }
        if encoded.pipelines == 1:
            for split in (True, False):
                yield Policy((1.0,) * ranks, split=split, order=order)


def _candidate(empty: Candidate, encoded: Encoded) -> Candidate:
    return empty._replace(rows=tuple(tuple(encoded.row(rank)) for rank in range(encoded.ranks)))
