"""Simulate: run the plans of all ranks on a clock, with a cost for each step and the resources of a GPU.

Each rank has two: the SMs, which one kernel fills at a time, and a copy engine. A matmul's last wave leaves SMs idle,
and another kernel's first waves may fill them: so a kernel has a body, during which it holds the SMs, and a tail,
during which it does not. Kernels start in the order in which they become ready. Of two that are ready at the same
time either may start first, and not the same one on every rank: a choice that CUDA leaves open, and that the seed
makes here.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Collection
from itertools import pairwise

from .order import Calls, Order
from .step import COMPUTES, COPIES, Step
from .timeline import Costs, Event, Timeline

CostOf = Callable[[int, Step], tuple[float, float]]
"""(rank, step) -> (body, tail)."""

Resource = tuple[int, str]
"""(rank, name)."""

TIE = 1e-9
"""Times this close are the same."""


def simulate(
    calls: Calls,
    costs: CostOf = Costs(),  # noqa: B008 (frozen)
    *,
    seed: int = 0,
    on_sms: Collection[str] = COMPUTES,
    compute: float | None = None,
) -> Timeline:
    """Run ``calls`` (for each call, the plans of all ranks) on a clock.

    Args:
        costs: the body and the tail of a step.
        seed: decides which of two kernels starts that become ready at the same time. The same seed, the same timeline.
        on_sms: kinds that are kernels. A copy that is not goes to the copy engine. A signal or barrier that is one
            needs the SMs to be free for a moment, so it may come behind a matmul.
        compute: how long the matmuls take without communication, in one piece. By default the sum of their chunks'
            bodies and one tail.

    Raises:
        ValueError: the plans deadlock; `verify` says where.
    """
    return _Simulation(calls, costs, seed, on_sms).timeline(compute)


class _Simulation:
    """One run. A step is ready when its stream's last step and all it follows are done; then it takes its resource."""

    def __init__(self, calls: Calls, costs: CostOf, seed: int, on_sms: Collection[str]) -> None:
        self.order = order = Order(calls)
        if order.stuck:
            raise ValueError("the plans deadlock, so they cannot be simulated: see verify(calls)")
        self._costs, self._on_sms = costs, on_sms
        self._events: list[Event] = []
        self._choices = [random.Random(f"{seed} {rank}") for rank in range(max(map(len, calls), default=0))]
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        self._obstacles = [0] * len(order.where)
        self._reached = [0.0] * len(order.where)  # when the stream's last step was done
        self._next: dict[int, int] = {}  # in the same stream
        self._heap: list[tuple[float, int, bool]] = []  # (time, step, whether it is done or only gives up its resource)
        self._queues: defaultdict[Resource, list[tuple[float, int]]] = defaultdict(
            list
        )  # (ready at, step), by resource
        self._in_use: set[Resource | None] = set()
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
        """The events, and what the busiest rank would take for its matmuls alone and for its copies alone."""
        bodies: defaultdict[tuple[int, bool], float] = defaultdict(float)
        tails = [0.0]
        for at in self.order.where:
            body, tail = self._costs(at.rank, at.step)
            if at.step.kind in ("produce", "consume"):
                tails.append(tail)
                bodies[at.rank, True] += body
            elif at.step.kind in COPIES:
                bodies[at.rank, False] += body
        matmuls, copies = (
            max((body for (_, matmul), body in bodies.items() if matmul == wanted), default=0.0)
            for wanted in (True, False)
        )
        self._events.sort(key=lambda event: event.start)
        return Timeline(tuple(self._events), matmuls + max(tails) if compute is None else compute, copies)

    def _run(self) -> None:
        for number, obstacles in enumerate(self._obstacles):
            if not obstacles:
                self._ready(number, 0.0)
        self._serve(0.0)
        while self._heap:
            now = self._heap[0][0]
            while self._heap and self._heap[0][0] <= now:  # all that ends now, before anything starts
                _, number, done = heapq.heappop(self._heap)
                if done:
                    self._done(number, now)
                else:
                    self._in_use.discard(self._resource(number))
            self._serve(now)

    def _leaves(self, number: int) -> bool:
        """Whether this is the second number of a barrier."""
        return number > 0 and self.order.where[number - 1] is self.order.where[number]

    def _resource(self, number: int) -> Resource | None:
        at = self.order.where[number]
        if at.step.kind in self._on_sms:
            return None if self._leaves(number) else (at.rank, "SMs")
        return (at.rank, "copy engine") if at.step.kind in COPIES else None

    def _ready(self, number: int, now: float) -> None:
        resource = self._resource(number)
        if resource is None:
            self._start(number, now)
        else:
            self._queues[resource].append((now, number))

    def _serve(self, now: float) -> None:
        for resource, queue in self._queues.items():
            while queue and resource not in self._in_use:
                first = min(queue)[0]
                tied = sorted(entry for entry in queue if entry[0] <= first + TIE)
                rank, name = resource
                chosen = self._choices[rank].choice(tied) if name == "SMs" and len(tied) > 1 else tied[0]
                queue.remove(chosen)
                self._in_use.add(resource)
                self._start(chosen[1], now)

    def _start(self, number: int, now: float) -> None:
        at = self.order.where[number]
        arrives = at.step.kind == "barrier" and not self._leaves(number)
        body, tail = (0.0, 0.0) if arrives else self._costs(at.rank, at.step)
        heapq.heappush(self._heap, (now + body + tail, number, True))
        if self._resource(number) is not None:
            heapq.heappush(self._heap, (now + body, number, False))
        if not arrives:
            reached = self._reached[number - 1 if self._leaves(number) else number]
            start = reached if at.step.kind in ("wait", "barrier") else now
            self._events.append(Event(at, start, now + body + tail, now - reached))

    def _done(self, number: int, now: float) -> None:
        if number in self._next:
            self._reached[self._next[number]] = now
        for later in self._followers[number]:
            self._obstacles[later] -= 1
            if not self._obstacles[later]:
                self._ready(later, now)
