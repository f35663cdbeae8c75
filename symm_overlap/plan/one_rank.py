"""Simulate one rank in place of all: how long a call takes if every rank does the same at the same time.

The plans of the ranks of a collective matmul are the same plan with the ranks rotated: what rank r does with rank r+1,
rank 0 does with rank 1. If all ranks start together and their steps cost the same, they stay in step. Then the signal
of rank r+d reaches rank r at the moment when rank r signals rank r-d, and no two ranks fetch from the same rank at a
time. So simulating one rank gives the time of all ranks, in a small part of the time that `simulate` needs for all of
them. The choice of a path simulates this way at the first call of every shape. Unlike `simulate`, this module counts
the time of the host, which issues the steps one after another, in the order of the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypedDict

from . import work
from .kinds import kind
from .plan import Plan
from .simulate import CostOf, moves_data
from .step import Step
from .work import Times, Work, doubles, integers, starts_of

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack

_SMS, _COPY_ENGINE = range(2)


class Conditions(TypedDict, total=False):
    """The conditions of a simulation; see `times_of_one_rank`."""

    on_sms: Required[Collection[str]]
    host: Sequence[float] | None
    flight: float


def makespan_of_one_rank(plan: Plan, costs: CostOf, **conditions: Unpack[Conditions]) -> float:
    """Return how long one call takes from its start on all ranks to its end, in the unit of the costs.

    See `times_of_one_rank` for the arguments and errors.
    """
    return max(times_of_one_rank(plan, costs, **conditions).ends, default=0.0)


def times_of_one_rank(
    plan: Plan,
    costs: CostOf,
    *,
    on_sms: Collection[str],
    host: Sequence[float] | None = None,
    flight: float = 0.0,
) -> Times:
    """Return when each step of one call runs, in the unit of the costs. All ranks start at 0. The times of the steps
    come first, in the order of the plan; after them come those of other work.

    Args:
        plan: the plan of any rank; the plans of the others are the same with the ranks rotated.
        costs, on_sms: see `simulate`.
        host: how long the host takes to issue each step, one after another; by default no time. No step starts before
            it is issued.
        flight: how long it takes until a peer can see what a step has posted. It does not block either of the two
            streams.

    Raises:
        ValueError: the plan deadlocks if every rank follows it. Or a cost is below 0, or the costs together are not
            finite.
    """
    count = len(plan.steps)
    posts, met = _meetings(plan)
    # The work after the steps: first what the host issues, in the order of issue, then the posts that are in flight.
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
    times = work.run(
        Work(
            stream=integers(
                [*(streams[step.stream] for step in plan.steps), *[0] * count, *range(first, first + len(posts))]
            ),
            after_starts=integers(starts_of([*after, *later])),
            after=integers(earlier for each in [*after, *later] for earlier in each),
            holds_starts=integers(starts_of([*holds, *[()] * others])),
            holds=integers(resource for each in holds for resource in each),
            body=doubles([body for body, _ in cost] + list(host or [0.0] * count) + [flight] * len(posts)),
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
    return times


def operations(plan: Plan) -> list[int]:
    """Return how many operations the host issues for each step, after the step before it.

    They are the event of the step before it, if another stream follows that step; one wait for each step of another
    stream that this step follows; and the step itself.
    """
    items = plan.program.items
    events = [False, *(item.event is not None for item in items)]
    return [event + len(item.waits) + 1 for item, event in zip(items, events, strict=False)]


def _meetings(plan: Plan) -> tuple[list[int], list[list[int]]]:
    """Return the steps that post, and for each step the steps whose posts it awaits; -1 is a post that never comes."""
    posts: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    awaits: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number, step in enumerate(plan.steps):
        meets = kind(step.kind).meets
        for peer in step.peers if meets in ("posts", "awaits") else ():
            # The rank d ahead posts its n-th signal to this rank when this rank posts its n-th to the rank d behind.
            ahead = peer - plan.rank if meets == "posts" else plan.rank - peer
            (posts if meets == "posts" else awaits)[ahead % plan.world, step.channel or 0].append(number)
    met: list[list[int]] = [[] for _ in plan.steps]
    for slots, numbers in awaits.items():
        posted = posts[slots]
        for turn, number in enumerate(numbers):
            met[number].append(posted[turn] if turn < len(posted) else -1)
    return list(dict.fromkeys(number for numbers in posts.values() for number in numbers)), met


def _resources(step: Step, on_sms: Collection[str]) -> tuple[int, ...]:
    """Return what a step holds: SMs or a copy engine, as in `simulate`.

    Links are left out, because they are busy only while the copy engine is.
    """
    if step.kind in on_sms:
        return (_SMS,)
    return (_COPY_ENGINE,) if moves_data(step) else ()
