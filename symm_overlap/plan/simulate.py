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

The clock itself is in csrc/sim, and in `engine` in plain Python. Here plans become its arrays, and its times become a
timeline.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

from . import work
from .kinds import kind
from .order import At, Calls, Order
from .step import Step
from .timeline import Costs, Event, Timeline, waits_at_once
from .work import Times, Work, doubles, integers, starts_of

CostOf = Callable[[int, Step], tuple[float, float]]
"""(rank, step) -> (body, tail)."""

Resource = tuple[int, str]
"""(rank, name): "SMs", "copy engine", "link out" or "link in"."""


def simulate(
    calls: Calls,
    costs: CostOf = Costs(),  # noqa: B008 (frozen)
    *,
    seed: int = 0,
    on_sms: Collection[str] | None = None,
    compute: float | None = None,
    run: Callable[[Work], Times] = work.run,
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
        run: the clock; `engine.run` is the same in plain Python.

    Raises:
        ValueError: the plans deadlock, or have a kind of step that is not registered; `verify` says where.
    """
    order = Order(calls)
    if order.stuck:
        raise ValueError("the plans deadlock, so they cannot be simulated: see verify(calls)")
    if on_sms is None:
        on_sms = {at.step.kind for at in order.where if kind(at.step.kind).occupies == "SMs"}
    costs_of = [costs(at.rank, at.step) for at in order.where]
    times = run(_work(order, costs_of, seed, on_sms))
    return _timeline(order, costs_of, times, compute)


def _work(order: Order, costs_of: list[tuple[float, float]], seed: int, on_sms: Collection[str]) -> Work:
    """The steps of plans as work: a barrier is two pieces, arriving and leaving."""
    numbers: dict[Resource, int] = {}
    holds = [
        [numbers.setdefault(resource, len(numbers)) for resource in _resources(order, number, on_sms)]
        for number in range(len(order.where))
    ]
    after = [order.follows.get(number, ()) for number in range(len(order.where))]
    costs = [(0.0, 0.0) if _arrives(order, number) else cost for number, cost in enumerate(costs_of)]
    lottery = [at.rank if held and at.step.kind in on_sms else -1 for at, held in zip(order.where, holds, strict=True)]
    lots = [_lots(seed, rank, lottery.count(rank)) for rank in range(max(map(len, order.calls), default=0))]
    nothing = integers([-1] * len(order.where))
    return Work(
        stream=integers(order.timeline),
        after_starts=integers(starts_of(after)),
        after=integers(-1 if earlier is None else earlier for each in after for earlier in each),
        holds_starts=integers(starts_of(holds)),
        holds=integers(resource for each in holds for resource in each),
        body=doubles(body for body, _ in costs),
        tail=doubles(tail for _, tail in costs),
        lottery=integers(lottery),
        lot_starts=integers(starts_of(lots)),
        lots=doubles(lot for each in lots for lot in each),
        loads=nothing,
        slowed=nothing,
        slow_down=doubles(()),
    )


def _lots(seed: int, rank: int, count: int) -> list[float]:
    """What decides between kernels of a rank that become ready at the same time."""
    source = random.Random(f"{seed} {rank}")
    return [source.random() for _ in range(count)]


def _leaves(order: Order, number: int) -> bool:
    """Whether this is the second number of a barrier."""
    return number > 0 and order.where[number - 1] is order.where[number]


def _arrives(order: Order, number: int) -> bool:
    """Whether this is the first number of a barrier."""
    return kind(order.where[number].step.kind).meets == "everyone" and not _leaves(order, number)


def _resources(order: Order, number: int, on_sms: Collection[str]) -> tuple[Resource, ...]:
    """What a step holds for its body: SMs or a copy engine, then links."""
    at = order.where[number]
    kernel, copy = at.step.kind in on_sms, moves_data(at.step)
    if not (kernel or copy) or _leaves(order, number):
        return ()
    engine = (at.rank, "SMs" if kernel else "copy engine")
    ends = [region.rank for region in at.step.reads[:1] + at.step.writes[:1]]
    if not copy or len(set(ends)) < 2:
        return (engine,)
    return engine, (ends[0], "link out"), (ends[1], "link in")


def _timeline(order: Order, costs_of: list[tuple[float, float]], times: Times, compute: float | None) -> Timeline:
    """The events, and what the busiest rank would take for its compute alone and for its copies alone."""
    bodies: defaultdict[tuple[int, bool], float] = defaultdict(float)
    tails = [0.0]
    for number, (at, (body, tail)) in enumerate(zip(order.where, costs_of, strict=True)):
        record = kind(at.step.kind)
        if _arrives(order, number):
            continue  # what the meeting takes counts once, when it leaves
        if record.role == "compute" and not record.overhead:
            tails.append(tail)
            bodies[at.rank, True] += body
        elif moves_data(at.step):
            bodies[at.rank, False] += body
    alone, copies = (_most(bodies, computes) for computes in (True, False))
    events = [_event(order, number, times) for number in times.order if not _arrives(order, number)]
    events.sort(key=lambda event: event.start)
    alone = alone + max(tails) if compute is None else compute
    return Timeline(tuple(events), alone, copies, _title(order.calls))


def _most(bodies: Mapping[tuple[int, bool], float], computes: bool) -> float:
    return max((body for (_, of_compute), body in bodies.items() if of_compute == computes), default=0.0)


def _event(order: Order, number: int, times: Times) -> Event:
    at: At = order.where[number]
    reached = times.reached[number - 1 if _leaves(order, number) else number]
    started = times.starts[number]
    start = reached if waits_at_once(at.step) else started
    return Event(at, start, times.ends[number], started - reached)


def moves_data(step: Step) -> bool:
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
