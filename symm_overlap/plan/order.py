"""The order of all steps when all ranks run their plans, call after call.

Steps are ordered by their stream, by ``after``, by barriers, and by slots: the n-th step that posts to a slot (a
signal, a send) comes before the n-th step that awaits it (a wait, a receive). The plans are run symbolically, each
stream as far as it can go. Meanwhile every step gets a vector clock, which says how far each stream of each rank is
certain to be done. So one comparison answers whether a step comes before another in every possible run. A stream that
cannot go on is a deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .kinds import kind
from .plan import Plan
from .step import Step

Calls = Sequence[Sequence[Plan]]
"""For each call, the plans of all ranks, in rank order."""

Slot = tuple[int, int, int]
"""(source rank, target rank, channel): posts, such as signals, are counted for each slot."""


@dataclass(slots=True)
class At:
    """A step and its place: the call, the rank whose plan it is in, and its index in that plan."""

    call: int
    rank: int
    index: int
    step: Step

    def __str__(self) -> str:
        return f"call {self.call}, rank {self.rank}, step {self.index}: {self.step}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: its kind, the steps that are involved, and a text."""

    kind: str
    steps: tuple[At, ...]
    text: str

    def __str__(self) -> str:
        return "\n".join([f"{self.kind}: {self.text}", *(f"    {at}" for at in self.steps)])


class Order:
    """The order of all steps of ``calls``. Steps are numbered, and ``where[number]`` is the step with that number.

    A barrier has two numbers, one for arriving and one for leaving: each rank leaves after all have arrived.

    Attributes:
        sequence: numbers of the steps that can run, each after all steps that must come before it.
        stuck: for each stream that stops for ever, the step at which it stops and the step that it waits for, which is
            None if no rank has that step.
        posts, awaits: numbers of the steps on each slot. The n-th step that posts pairs with the n-th that awaits.
        arrivals: for each (channel, rank), the numbers of arriving at its barriers. The n-th barriers of all ranks are
            one barrier.
        calls: the plans from which the order was computed.

    Raises:
        ValueError: the calls have different numbers of ranks, or a step comes after one that is not before it.
    """

    def __init__(self, calls: Calls) -> None:
        worlds = [len(plans) for plans in calls]
        if len(set(worlds)) > 1:
            raise ValueError(f"the calls have plans of {worlds} ranks: all need the same number of ranks")
        self.calls = calls
        self.where: list[At] = []
        self.sequence: list[int] = []
        self.stuck: dict[int, int | None] = {}
        self.posts: defaultdict[Slot, list[int]] = defaultdict(list)
        self.awaits: defaultdict[Slot, list[int]] = defaultdict(list)
        self.arrivals: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.timeline: list[int] = []  # for each step: its timeline, a stream of a rank
        self._position: list[int] = []  # for each step: its position in its timeline, from 1
        self._timelines: dict[tuple[int, str], int] = {}
        self.timelines: list[list[int]] = []  # the steps of each timeline
        self.follows: defaultdict[int, list[int | None]] = defaultdict(
            list
        )  # the steps of other timelines it waits for
        for call, plans in enumerate(calls):
            for plan in plans:
                self._number(call, plan)
        self._match(max((len(plans) for plans in calls), default=0))
        self._clock: list[list[int]] = [[]] * len(self.where)
        self._run()

    def before(self, first: int, second: int) -> bool:
        """True if ``first`` is done before ``second`` starts in every run. Both must be in ``sequence``."""
        timeline = self.timeline[first]
        if timeline == self.timeline[second]:
            return self._position[first] < self._position[second]
        return self._clock[second][timeline] >= self._position[first]

    def reached_after(self, first: int, second: int) -> bool:
        """True if ``first`` is done before ``second`` is reached in every run. Both must be in ``sequence``.

        A wait is reached before the posts that it awaits have come, so this is a stronger claim than `before`.
        """
        rank = self.where[second].rank
        own = [earlier for earlier in self.follows.get(second, ()) if earlier is not None]
        own = [earlier for earlier in own if self.where[earlier].rank == rank]
        if self._position[second] > 1:
            own.append(self.timelines[self.timeline[second]][self._position[second] - 2])
        return any(first == earlier or self.before(first, earlier) for earlier in own)

    def _number(self, call: int, plan: Plan) -> None:
        numbers: list[int] = []
        for index, step in enumerate(plan.steps):
            at = At(call, plan.rank, index, step)
            number = self._append(at)
            if step.after:
                if not all(0 <= earlier < index for earlier in step.after):
                    raise ValueError(f"{at}: after is {step.after}: it may name only earlier steps")
                self.follows[number] += [numbers[earlier] for earlier in step.after]
            channel = step.channel or 0
            meets = kind(step.kind).meets
            if meets == "posts":
                for peer in step.peers:
                    self.posts[plan.rank, peer, channel].append(number)
            elif meets == "awaits":
                for peer in step.peers:
                    self.awaits[peer, plan.rank, channel].append(number)
            elif meets == "everyone":
                self.arrivals[channel, plan.rank].append(number)
                number = self._append(at)
            numbers.append(number)

    def _append(self, at: At) -> int:
        timeline = self._timelines.setdefault((at.rank, at.step.stream), len(self._timelines))
        if timeline == len(self.timelines):
            self.timelines.append([])
        number = len(self.where)
        self.timelines[timeline].append(number)
        self.where.append(at)
        self.timeline.append(timeline)
        self._position.append(len(self.timelines[timeline]))
        return number

    def _match(self, world: int) -> None:
        for slot, awaits in self.awaits.items():
            posts = self.posts[slot]
            for turn, number in enumerate(awaits):
                self.follows[number].append(posts[turn] if turn < len(posts) else None)
        for (channel, rank), arrivals in list(self.arrivals.items()):
            others = [self.arrivals.get((channel, other), []) for other in range(world) if other != rank]
            for turn, arrival in enumerate(arrivals):  # arrival + 1 is the step's number for leaving
                self.follows[arrival + 1] += [other[turn] if turn < len(other) else None for other in others]

    def _run(self) -> None:
        done = [0] * len(self.timelines)
        known = [[0] * len(self.timelines) for _ in self.timelines]  # for each timeline, how far the others surely are
        blocked: defaultdict[int | None, list[int]] = defaultdict(list)  # timelines, by the step they wait for
        runnable = list(range(len(self.timelines)))
        while runnable:
            timeline = runnable.pop()
            steps = self.timelines[timeline]
            while done[timeline] < len(steps):
                number = steps[done[timeline]]
                follows = self.follows.get(number)
                if follows:
                    obstacles = [earlier for earlier in follows if earlier is None or not self._clock[earlier]]
                    if obstacles:
                        self.stuck[number] = obstacles[0]
                        blocked[obstacles[0]].append(timeline)
                        break
                    self.stuck.pop(number, None)
                    known[timeline] = self._learnt(known[timeline], follows)
                self._clock[number] = known[timeline]  # never changed once a step has it: see _learnt
                self.sequence.append(number)
                done[timeline] += 1
                if number in blocked:
                    runnable += blocked.pop(number)

    def _learnt(self, known: list[int], follows: list[int | None]) -> list[int]:
        """Return the clock of a timeline whose clock was ``known`` once it has also waited for these steps."""
        for earlier in follows:
            assert earlier is not None
            timeline, position = self.timeline[earlier], self._position[earlier]
            if known[timeline] < position:
                known = list(map(max, known, self._clock[earlier]))
                known[timeline] = position
        return known
