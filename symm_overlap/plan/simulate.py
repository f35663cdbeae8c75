"""Simulate: run the plans of all ranks on a clock, with a cost for each step and the resources of a GPU.

Each rank has its SMs, which one kernel fills at a time, a copy engine, and a link to a switch with one direction out
and one in. A matmul's last wave leaves SMs idle, and the first waves of another kernel may fill them. So a kernel has a
body, during which it holds the SMs, and a tail, during which it does not. A copy from one rank to another holds its
engine (or the SMs, if it is a kernel), the outgoing link of the source and the incoming link of the target, all for its
body. A copy within a rank needs no link. Kernels that read a peer's memory in place are not counted on the links.

Resources are served first come, first served. A step starts once all that it needs is free, and holds nothing before it
starts, so no two steps can wait for each other. SMs and copy engines work in order: a copy whose link is busy holds up
the copies behind it on its engine, as a slow copy would. Links have no order of their own: whichever step can start
does so, the oldest first. If two kernels are ready at the same time, either may start first, and the choice may differ
between ranks. CUDA leaves this choice open; here the seed makes it. Of two copies that are ready at the same time, the
copy of the lower rank starts first, and on one rank the copy that is earlier in its plan.

The clock itself is in csrc/sim. This module turns plans into its arrays, and its times into a timeline.
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
"""Function from (rank, step) to (body, tail): for how long the step holds its resources, and how long it runs on."""

Resource = tuple[int, str]
"""(rank, name): "SMs", "copy engine", "link out" or "link in"."""


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
        costs: a function that returns the body and the tail of a step, such as `Costs`.
        seed: decides which kernel starts first if two become ready at the same time. The same seed gives the same
            timeline.
        on_sms: names of the kinds that are kernels; by default the kinds whose record says that they occupy the SMs. A
            copy that is not a kernel uses the copy engine. A signal or barrier that is a kernel needs the SMs to be
            free for a moment, so a matmul may delay it.
        compute: how long the matmuls take without communication, in one piece. By default the sum of their chunks'
            bodies and one tail.

    Returns:
        The timeline: when each step ran, the makespan and the overlap efficiency.

    Raises:
        ValueError: the plans deadlock, a kind of step is not registered, a step's ``after`` names a later step, or the
            calls have different numbers of ranks (`verify` says where); or a cost is below 0, or the costs together are
            not finite.
    """
    order = Order(calls)
    if order.stuck:
        raise ValueError("the plans deadlock, so they cannot be simulated: see verify(calls)")
    if on_sms is None:
        on_sms = {at.step.kind for at in order.where if kind(at.step.kind).occupies == "SMs"}
    costs_of = [costs(at.rank, at.step) for at in order.where]
    times = work.run(_work(order, costs_of, seed, on_sms))
    return _timeline(order, costs_of, times, compute)


def _work(order: Order, costs_of: list[tuple[float, float]], seed: int, on_sms: Collection[str]) -> Work:
    """Return the steps of the plans as work. A barrier becomes two pieces of work: arriving and leaving."""
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
    """Return the random numbers that decide between kernels of a rank that become ready at the same time."""
    source = random.Random(f"{seed} {rank}")
    return [source.random() for _ in range(count)]


def _leaves(order: Order, number: int) -> bool:
    """True if this is the second number of a barrier, for leaving it."""
    return number > 0 and order.where[number - 1] is order.where[number]


def _arrives(order: Order, number: int) -> bool:
    """True if this is the first number of a barrier, for arriving at it."""
    return kind(order.where[number].step.kind).meets == "everyone" and not _leaves(order, number)


def _resources(order: Order, number: int, on_sms: Collection[str]) -> tuple[Resource, ...]:
    """Return the resources that a step holds for its body: SMs or a copy engine, then links."""
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
    """Return the events, and how long the busiest rank would take for its compute alone and for its copies alone."""
    bodies: defaultdict[tuple[int, bool], float] = defaultdict(float)
    tails = [0.0]
    for number, (at, (body, tail)) in enumerate(zip(order.where, costs_of, strict=True)):
        record = kind(at.step.kind)
        if _arrives(order, number):
            continue  # the cost of the barrier counts once, when the rank leaves it
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
    """True if a step moves data: over links between ranks, with the copy engine or, if it is a kernel, with the SMs."""
    record = kind(step.kind)
    return record.role == "copy" or record.occupies == "copy engine"


def _title(calls: Calls) -> str:
    """Return the ops, the world size and the number of chunks as text."""
    plans = [plan for each in calls for plan in each]
    ops = ", ".join(dict.fromkeys(plan.op for plan in plans))
    world = max((plan.world for plan in plans), default=0)
    pieces = [step.chunk[1] for plan in plans for step in plan.steps if step.chunk is not None]
    chunks = 1 + max(pieces, default=0)
    text = f"{ops}: {world} rank{'s' * (world != 1)}, {chunks} chunk{'s' * (chunks != 1)} a rank"
    return text if len(calls) == 1 else f"{text}, {len(calls)} calls"
