"""Create a schedule by giving every idle rank the best action that is ready, under a cap on the memory of activations.

All ranks run on one clock, with the durations of the costs. When a rank becomes idle, it chooses among the forwards and
backwards whose inputs have arrived, by the preferences of a `Policy`. A weight gradient fills time in which there is
nothing else, or in which the cap allows no forward. So the schedule adapts to costs of any shape, unlike those of the
generators.

No rank gets stuck: a forward runs only if the microbatches on the rank can still end one after another, the oldest
first. So the oldest microbatch of all can always continue, and then frees its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from random import Random

from ...plan.work import integers
from ..simulation.activations import Activations, B, F, I, W, fits
from ..simulation.costs import PipelineCosts
from ..simulation.encoded import Encoded, code_of, placement_of


@dataclass(frozen=True)
class Policy:
    """The preferences of a rank.

    Attributes:
        forwards_first: prefer a forward to a backward.
        late_stages_first: of two forwards, prefer the one of the later stage, which lets a microbatch end sooner.
        early_gradients_first: of two backwards, prefer the one of the earlier stage.
        split: run I and W separately, and W when there is time; otherwise run B.
        patience: a rank does not begin a W if something better arrives within ``patience`` times the duration of the W.
        shares: for each rank, which fraction it may use of the memory that the cap leaves besides one whole microbatch.
            It limits the depth of the warm-up.
        order: for each forward (True, stage, microbatch) and backward (False, ...), when another schedule begins it.
            Earlier ones come first.
        delays: for each forward (True, stage) and backward (False, stage), a time that is added to its ``order``.
    """

    shares: tuple[float, ...]
    forwards_first: bool = False
    late_stages_first: bool = True
    early_gradients_first: bool = False
    split: bool = True
    patience: float = 0.5
    order: Mapping[tuple[bool, int, int], float] = field(default_factory=dict)
    delays: Mapping[tuple[bool, int], float] = field(default_factory=dict)

    def preference(self, forward: bool, stage: int, microbatch: int) -> tuple[float, int, int]:
        """Return a sort key: of the ready actions, the one with the smallest key comes first."""
        early = not self.late_stages_first if forward else self.early_gradients_first
        when = self.order.get((forward, stage, microbatch), 0.0) + self.delays.get((forward, stage), 0.0)
        return when, int(forward != self.forwards_first), stage if early else -stage

    def changed(self, random: Random, stages: int, unit: float) -> Policy:
        """Return a policy that differs a little from this one; ``unit`` is the mean duration of an action."""
        if self.order and random.random() < 0.5:
            which = (random.random() < 0.5, random.randrange(stages))
            delay = self.delays.get(which, 0.0) + random.uniform(-4.0, 4.0) * unit
            return replace(self, delays={**self.delays, which: delay})
        what = random.randrange(8)
        if what == 0:
            return replace(self, forwards_first=not self.forwards_first)
        if what == 1:
            return replace(self, late_stages_first=not self.late_stages_first)
        if what == 2:
            return replace(self, early_gradients_first=not self.early_gradients_first)
        if what == 3:
            return replace(self, patience=random.choice((0.0, 0.25, 0.5, 1.0, 2.0)))
        rank, shares = random.randrange(len(self.shares)), list(self.shares)
        ranks = range(rank, len(shares)) if what == 4 else (rank,)
        by = random.uniform(-0.25, 0.25)
        for each in ranks:
            shares[each] = min(1.0, max(0.0, shares[each] + by))
        return replace(self, shares=tuple(shares))


class ListSchedule:
    """Creates schedules of one pipeline on given stages."""

    def __init__(
        self, ranks: int, placement: tuple[int, ...], microbatches: int, costs: PipelineCosts, cap: float
    ) -> None:
        stages = len(placement)
        self.placement, self.microbatches, self.ranks = placement, microbatches, ranks
        self.activations = Activations(costs, stages)
        self.stages_of = [[stage for stage in range(stages) if placement[stage] == rank] for rank in range(ranks)]
        self.durations = {
            kind: costs.each(name, stages)
            for kind, name in ((F, "forward"), (I, "input_grad"), (W, "weight_grad"), (B, "full_backward"))
        }
        size = costs.each("message", stages)
        self.transfer = [each / costs.bandwidth for each in size]
        self.latency = costs.latency
        self.unit = sum(map(sum, self.durations.values())) / (4 * stages)
        # No rank can use more memory than all its microbatches need.
        self.whole = [sum(self.most_of(stage) for stage in mine) for mine in self.stages_of]
        self.caps = [min(cap, whole * microbatches) for whole in self.whole]

    def most_of(self, stage: int) -> float:
        """Return the most memory that one microbatch ever uses on a stage."""
        return max(self.activations.whole[stage], self.activations.kept[stage])

    def run(self, policy: Policy) -> Encoded | None:
        """Return the schedule of a policy, or None if one whole microbatch does not fit the cap."""
        return _Run(self, policy).run()


class _Run:
    """One run of the clock. ``next`` counts the started actions of each kind and stage, in microbatch order."""

    def __init__(self, given: ListSchedule, policy: Policy) -> None:
        self.given, self.policy = given, policy
        stages = len(given.placement)
        self.backward = I if policy.split else B
        self.next = {kind: [0] * stages for kind in (F, I, W, B)}
        # When the input of each forward and backward arrives, in microbatch order, as far as it is known.
        self.inputs: list[list[float]] = [[] for _ in range(stages)]
        self.gradients: list[list[float]] = [[] for _ in range(stages)]
        self.inputs[0] = [0.0] * given.microbatches
        self.free = [0.0] * given.ranks
        self.link_free = [0.0] * given.ranks
        # For each microbatch on a rank, oldest first: the memory it holds, and the memory its later forwards will need.
        self.held: list[dict[int, float]] = [{} for _ in range(given.ranks)]
        self.missing: list[dict[int, float]] = [{} for _ in range(given.ranks)]
        self.rows: list[list[int]] = [[] for _ in range(given.ranks)]
        self.events: list[tuple[float, int]] = []
        self.limits = [
            whole + (cap - whole) * share
            for whole, cap, share in zip(given.whole, given.caps, policy.shares, strict=True)
        ]

    def run(self) -> Encoded | None:
        given = self.given
        if not all(fits(whole, cap) for whole, cap in zip(given.whole, given.caps, strict=True)):
            return None
        self.events = [(0.0, rank) for rank in range(given.ranks)]
        while self.events:
            now, rank = heappop(self.events)
            if self.free[rank] <= now:
                self.choose(rank, now)
        starts = [0]
        for row in self.rows:
            starts.append(starts[-1] + len(row))
        cells = integers([code for row in self.rows for code in row])
        assert len(cells) == len(given.placement) * given.microbatches * (3 if self.policy.split else 2), "a rank waits"
        return Encoded(cells, integers(starts), integers([]), placement_of(given.placement), given.microbatches)

    def choose(self, rank: int, now: float) -> None:
        """Start the best action that is ready, if any. Otherwise the next arrival wakes the rank again."""
        best: tuple[tuple[float, int, int], int, int, int] | None = None
        weight: tuple[int, int, int] | None = None
        soon = inf
        for stage in self.given.stages_of[rank]:
            for kind, arrivals in ((self.backward, self.gradients[stage]), (F, self.inputs[stage])):
                microbatch = self.next[kind][stage]
                if microbatch >= len(arrivals) or (kind == F and not self.has_room(rank, stage, microbatch)):
                    continue
                if arrivals[microbatch] > now:
                    soon = min(soon, arrivals[microbatch])
                    continue
                found = (self.policy.preference(kind == F, stage, microbatch), kind, stage, microbatch)
                best = found if best is None else min(best, found)
            if self.policy.split and self.next[W][stage] < self.next[I][stage]:
                oldest = (self.next[W][stage], -stage, stage)
                weight = oldest if weight is None else min(weight, oldest)
        if best is not None:
            self.begin(rank, now, *best[1:])
        elif weight is not None and soon >= now + self.policy.patience * self.given.durations[W][weight[2]]:
            self.begin(rank, now, W, weight[2], weight[0])
        elif soon < inf:
            heappush(self.events, (soon, rank))

    def has_room(self, rank: int, stage: int, microbatch: int) -> bool:
        """True if, with one more forward, the microbatches of the rank can still end one after another, oldest first.

        (This is the check of Dijkstra's banker's algorithm.) Each microbatch needs room for its remaining forwards,
        besides what it and the younger ones hold. Memory of older ones is free by then.
        """
        held, missing = self.held[rank], self.missing[rank]
        more = self.given.most_of(stage)
        # A microbatch that has not started on this rank is the youngest.
        together = 0.0 if microbatch in held else more
        for each in reversed(held):
            together += held[each]
            to_come = missing[each]
            if each == microbatch:
                together += more
                to_come -= more
            if not fits(together + to_come, self.limits[rank]):
                return False
        return True

    def begin(self, rank: int, now: float, kind: int, stage: int, microbatch: int) -> None:
        given = self.given
        end = now + given.durations[kind][stage]
        self.next[kind][stage] += 1
        self.rows[rank].append(code_of(kind, stage, microbatch))
        self.free[rank] = end
        heappush(self.events, (end, rank))
        self.keep(rank, kind, stage, microbatch)
        if kind == F:
            last = stage + 1 == len(given.placement)
            self.arrive(rank, stage, stage if last else stage + 1, end, self.gradients if last else self.inputs)
        elif kind == self.backward and stage:
            self.arrive(rank, stage - 1, stage - 1, end, self.gradients)

    def keep(self, rank: int, kind: int, stage: int, microbatch: int) -> None:
        """Account for the memory that an action allocates or frees."""
        held, most, kept = self.held[rank], self.given.most_of(stage), self.given.activations.kept[stage]
        change = {F: most, I: kept - most, W: -kept, B: -most}[kind]
        held[microbatch] = held.get(microbatch, 0.0) + change
        if kind == F:
            missing = self.missing[rank]
            missing[microbatch] = missing.get(microbatch, self.given.whole[rank]) - most
        elif kind in (W, B) and self.is_done(rank, microbatch):
            del held[microbatch]

    def is_done(self, rank: int, microbatch: int) -> bool:
        """True if all backwards of a microbatch on a rank have started."""
        kind = W if self.policy.split else B
        return all(self.next[kind][stage] > microbatch for stage in self.given.stages_of[rank])

    def arrive(self, rank: int, sized: int, stage: int, end: float, arrivals: list[list[float]]) -> None:
        """Record when a result ready at ``end`` arrives at a stage. The message is as large as the output of
        ``sized``."""
        given = self.given
        there = given.placement[stage]
        at = end
        if there != rank:
            sent = max(end, self.link_free[rank]) + given.transfer[sized] + given.latency
            self.link_free[rank] = at = sent
        arrivals[stage].append(at)
        heappush(self.events, (at, there))
