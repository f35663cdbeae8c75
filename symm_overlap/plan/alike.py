"""Simulate one rank for all: how long a call takes where every rank does the same at the same time.

The plans of a collective matmul are one plan, turned: what rank r does with rank r+1, rank 0 does with rank 1. Where
all ranks start together and their steps cost the same, they stay together. Then a peer's signal comes when this rank
gives its own to the rank that lies as far off on the other side, and no two ranks fetch from the same one at a time. So
one rank on a clock tells what all of them take, in a small part of the time that `simulate` needs for all. The choice
of a path asks for it at the first call of every shape. Unlike `simulate` it counts the host, which issues the steps one
after another, in the order of the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from . import work
from .kinds import kind
from .plan import Plan
from .simulate import CostOf, moves_data
from .step import Step
from .work import Times, Work, doubles, integers, starts_of

_SMS, _COPY_ENGINE = range(2)


def makespan_alike(
    plan: Plan,
    costs: CostOf,
    *,
    on_sms: Collection[str],
    issue: float = 0.0,
    issued: Sequence[int] | None = None,
    flight: float = 0.0,
    run: Callable[[Work], Times] = work.run,
) -> float:
    """How long one call takes from its start on all ranks to its end, in the unit of the costs.

    Args:
        plan: of any rank; the others' are the same, turned.
        costs, on_sms, run: see `simulate`.
        issue: how long the host takes for one operation; no step starts before it is issued.
        issued: how many operations the host issues for each step; by default see `operations`.
        flight: how long it takes until a peer can see what a step has posted; it holds up neither of the two streams.

    Raises:
        ValueError: the plan deadlocks where every rank follows it.
    """
    count = len(plan.steps)
    issued = operations(plan) if issued is None else issued
    posts, met = _meetings(plan)
    # Behind the steps come the host's pieces of work, in the order in which it issues them, and then what is under way.
    flights = {number: 2 * count + turn for turn, number in enumerate(posts)}
    after = [
        [*step.after, *(flights.get(post, post) for post in met[number]), count + number]
        for number, step in enumerate(plan.steps)
    ]
    others = count + len(posts)
    later: list[Sequence[int]] = [*[()] * count, *([number] for number in posts)]
    holds = [_resources(step, on_sms) for step in plan.steps]
    cost = [costs(plan.rank, step) for step in plan.steps]
    streams = {name: number for number, name in enumerate(plan.streams, start=1)}
    nothing = integers([-1] * (count + others))
    first = 1 + len(streams)
    times = run(
        Work(
            stream=integers(
                [*(streams[step.stream] for step in plan.steps), *[0] * count, *range(first, first + len(posts))]
            ),
            after_starts=integers(starts_of([*after, *later])),
            after=integers(earlier for each in [*after, *later] for earlier in each),
            holds_starts=integers(starts_of([*holds, *[()] * others])),
            holds=integers(resource for each in holds for resource in each),
            body=doubles(
                [body for body, _ in cost] + [issue * operations for operations in issued] + [flight] * len(posts)
            ),
            tail=doubles([tail for _, tail in cost] + [0.0] * others),
            lottery=nothing,
            lot_starts=integers([0]),
            lots=doubles(()),
            loads=nothing,
            slowed=nothing,
            slow_down=doubles(()),
        )
    )
    if len(times.order) < count + others:
        raise ValueError(f"the plan of {plan.op} deadlocks, so it cannot be simulated: see verify(calls)")
    return max(times.ends, default=0.0)


def operations(plan: Plan) -> list[int]:
    """How many operations the host issues for each step, behind the step before it: the event of that one, if another
    stream follows it; a wait for each step of another stream that is followed; and the step itself.
    """
    items = plan.program.items
    events = [False, *(item.event is not None for item in items)]
    return [event + len(item.waits) + 1 for item, event in zip(items, events, strict=False)]


def _meetings(plan: Plan) -> tuple[list[int], list[list[int]]]:
    """The steps that post, and for each step those whose posts it awaits: -1 is one that never comes."""
    posts: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    awaits: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number, step in enumerate(plan.steps):
        meets = kind(step.kind).meets
        for peer in step.peers if meets in ("posts", "awaits") else ():
            # A peer so far ahead gives its n-th signal to this rank when this rank does to the one so far behind.
            ahead = peer - plan.rank if meets == "posts" else plan.rank - peer
            (posts if meets == "posts" else awaits)[ahead % plan.world, step.channel or 0].append(number)
    met: list[list[int]] = [[] for _ in plan.steps]
    for slots, numbers in awaits.items():
        posted = posts[slots]
        for turn, number in enumerate(numbers):
            met[number].append(posted[turn] if turn < len(posted) else -1)
    return list(dict.fromkeys(number for numbers in posts.values() for number in numbers)), met


def _resources(step: Step, on_sms: Collection[str]) -> tuple[int, ...]:
    """As in `simulate`, SMs or a copy engine; not the links, which are busy only while the copy engine is."""
    if step.kind in on_sms:
        return (_SMS,)
    return (_COPY_ENGINE,) if moves_data(step) else ()
