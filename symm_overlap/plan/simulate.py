"""Simulate: run the plans of all ranks on a clock, with a cost for each step and the resources of a GPU.

Each rank has the SMs, which one kernel fills at a time, a copy engine, and a link to a switch, one way out and one way
in. A matmul's last wave leaves SMs idle, and another kernel's first waves may fill them: so a kernel has a body, during
which it holds the SMs, and a tail, during which it does not. A copy from one rank to another holds its engine (or the
SMs, if it is a kernel), the link out of the one and the link into the other, all for its body; a copy within a rank
needs no link. Kernels that read a peer's memory in place are not counted on the links.

First come, first served. A step starts once all that it needs is free, and holds nothing before: so no two can wait for
each other. SMs and copy engines work in order: a copy whose link is busy holds up those behind it there, as a slow copy
would. Links have no order of their own: whoever can start does, the oldest first. Of two kernels that are ready at the
same time either may start first, and not the same one on every rank: a choice that CUDA leaves open, and that the seed
makes here. Of two copies it is the lower rank's, and on one rank the earlier in its plan.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Collection
from itertools import pairwise

from .kinds import kind
from .order import Calls, Order
from .step import Step
from .timeline import Costs, Event, Timeline

CostOf = Callable[[int, Step], tuple[float, float]]
"""(rank, step) -> (body, tail)."""

Resource = tuple[int, str]
"""(rank, name): "SMs", "copy engine", "link out" or "link in"."""

TIE = 1e-9
"""Times this close are the same."""


def simulate(
    calls: Calls,
    costs: CostOf = Costs(),  # noqa: B008 (frozen)
    *,
    seed: int = 0,
    on_sms: Collection[str] | None = None,
    compute: float | None = None,
) -> Timeline:
    """Run ``calls`` (for each call, the plans of all ranks) on a clock.

    Args:
        costs: the body and the tail of a step.
        seed: decides which of two kernels starts that become ready at the same time. The same seed, the same timeline.
        on_sms: names of the kinds that are kernels; by default those whose record says that they occupy the SMs. A
            copy that is not a kernel goes to the copy engine. A signal or barrier that is a kernel needs the SMs to be
            free for a moment, so it may come behind a matmul.
        compute: how long the matmuls take without communication, in one piece. By default the sum of their chunks'
            bodies and one tail.

    Raises:
        ValueError: the plans deadlock, or have a kind of step that is not registered; `verify` says where.
    """
    return _Simulation(calls, costs, seed, on_sms).timeline(compute)


class _Simulation:
    """One run. A step is ready when its stream's last step and all it follows are done; then it takes its resources."""

    def __init__(self, calls: Calls, costs: CostOf, seed: int, on_sms: Collection[str] | None) -> None:
        self.order = order = Order(calls)
        if order.stuck:
            raise ValueError("the plans deadlock, so they cannot be simulated: see verify(calls)")
        if on_sms is None:
            on_sms = {at.step.kind for at in order.where if kind(at.step.kind).occupies == "SMs"}
        self._costs, self._on_sms = costs, on_sms
        self._events: list[Event] = []
        self._choices = [random.Random(f"{seed} {rank}") for rank in range(max(map(len, calls), default=0))]
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        self._obstacles = [0] * len(order.where)
        self._reached = [0.0] * len(order.where)  # when the stream's last step was done
        self._next: dict[int, int] = {}  # in the same stream
        self._heap: list[tuple[float, int, bool]] = []  # (time, step, is it done or does it give up its resources)
        self._queue: list[tuple[float, float, int]] = []  # (ready at, what breaks a tie, step)
        self._in_use: set[Resource] = set()
        for members in order.timelines:
            self._next |= dict(pairwise(members))
        for number in range(len(order.where)):
            for earlier in order.follows.get(number, ()):
                assert earlier is not None  # or the order would be stuck
                self._followers[earlier].append(number)
                self._obstacles[number] += 1
        for earlier, number in self._next.items():
            self._followers[earlier].append(number)
            self._obstacles[number] += 1
        self._run()

    def timeline(self, compute: float | None) -> Timeline:
        """The events, and what the busiest rank would take for its compute alone and for its copies alone."""
        bodies: defaultdict[tuple[int, bool], float] = defaultdict(float)
        tails = [0.0]
        for at in self.order.where:
            body, tail = self._costs(at.rank, at.step)
            record = kind(at.step.kind)
            if record.role == "compute" and not record.overhead:
                tails.append(tail)
                bodies[at.rank, True] += body
            elif _moves_data(at.step):
                bodies[at.rank, False] += body
        alone, copies = (
            max((body for (_, computes), body in bodies.items() if computes == wanted), default=0.0)
            for wanted in (True, False)
        )
        self._events.sort(key=lambda event: event.start)
        alone = alone + max(tails) if compute is None else compute
        return Timeline(tuple(self._events), alone, copies, _title(self.order.calls))

    def _run(self) -> None:
        for number, obstacles in enumerate(self._obstacles):
            if not obstacles:
                self._ready(number, 0.0)
        self._serve(0.0)
        while self._heap:
            now = self._heap[0][0]
            while self._heap and self._heap[0][0] <= now + TIE:  # all that ends now, before anything starts
                _, number, done = heapq.heappop(self._heap)
                if done:
                    self._done(number, now)
                else:
                    self._in_use.difference_update(self._resources(number))
            self._serve(now)

    def _leaves(self, number: int) -> bool:
        """Whether this is the second number of a barrier."""
        return number > 0 and self.order.where[number - 1] is self.order.where[number]

    def _resources(self, number: int) -> tuple[Resource, ...]:
        """What a step holds for its body: SMs or a copy engine, then links."""
        at = self.order.where[number]
        kernel, copy = at.step.kind in self._on_sms, _moves_data(at.step)
        if self._leaves(number) or not (kernel or copy):
            return ()
        engine = (at.rank, "SMs" if kernel else "copy engine")
        ends = [region.rank for region in at.step.reads[:1] + at.step.writes[:1]]
        if not copy or len(set(ends)) < 2:
            return (engine,)
        return engine, (ends[0], "link out"), (ends[1], "link in")

    def _ready(self, number: int, now: float) -> None:
        at = self.order.where[number]
        if self._resources(number):
            tie = self._choices[at.rank].random() if at.step.kind in self._on_sms else 0.0
            self._queue.append((now, tie, number))
        else:
            self._start(number, now)

    def _serve(self, now: float) -> None:
        """Start whatever can, the oldest first; but nothing ahead of an older one on the same SMs or copy engine."""
        passed: set[Resource] = set()
        for entry in sorted(self._queue):
            resources = self._resources(entry[-1])
            if resources[0] not in passed and self._in_use.isdisjoint(resources):
                self._queue.remove(entry)
                self._in_use.update(resources)
                self._start(entry[-1], now)
            passed.add(resources[0])

    def _start(self, number: int, now: float) -> None:
        at = self.order.where[number]
        arrives = kind(at.step.kind).meets == "everyone" and not self._leaves(number)
        body, tail = (0.0, 0.0) if arrives else self._costs(at.rank, at.step)
        heapq.heappush(self._heap, (now + body + tail, number, True))
        if self._resources(number):
            heapq.heappush(self._heap, (now + body, number, False))
        if not arrives:
            reached = self._reached[number - 1 if self._leaves(number) else number]
            start = reached if kind(at.step.kind).meets in ("awaits", "everyone") else now
            self._events.append(Event(at, start, now + body + tail, now - reached))

    def _done(self, number: int, now: float) -> None:
        if number in self._next:
            self._reached[self._next[number]] = now
        for later in self._followers[number]:
            self._obstacles[later] -= 1
            if not self._obstacles[later]:
                self._ready(later, now)


def _moves_data(step: Step) -> bool:
    """Whether a step takes the copy engine and the links between ranks, unless it is a kernel that takes the SMs."""
    record = kind(step.kind)
    return record.role == "copy" or record.occupies == "copy engine"


def _title(calls: Calls) -> str:
    """The ops, the world size and the number of chunks, in words."""
    plans = [plan for each in calls for plan in each]
    ops = ", ".join(dict.fromkeys(plan.op for plan in plans))
    world = max((plan.world for plan in plans), default=0)
    pieces = [step.chunk[1] for plan in plans for step in plan.steps if step.chunk is not None]
    chunks = 1 + max(pieces, default=0)
    text = f"{ops}: {world} rank{'s' * (world != 1)}, {chunks} chunk{'s' * (chunks != 1)} a rank"
    return text if len(calls) == 1 else f"{text}, {len(calls)} calls"
