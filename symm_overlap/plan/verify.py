"""Verify: prove that the plans of all ranks, run back to back, have no deadlock and no data race.

The proof uses nothing but the order that the steps enforce (`order`), so it holds for every speed of every stream. It
shows:

- No stream waits for ever, and no signal is left over that a later call would consume.
- The n-th signal of a slot is the n-th in every run, and so are the n-th wait, and a rank's n-th barrier of a channel.
  So counting them is enough.
- Any two accesses to the same memory, at least one of them a write, are ordered.
- A call writes to a half of the workspace only after all accesses of earlier calls to that half.
- Whatever a step reads was written in the same call, unless the buffer outlives calls. Whatever the join reads was
  written exactly once. Nothing else is written to outputs, and nothing to inputs.
- The caller, for whom the fork writes and the join reads, has written nothing but inputs, and some rank reads every
  output.
- If the calls may be captured in CUDA graphs, no order that a graph may choose is a deadlock (`graph_order`).
- Peers touch the inputs and outputs of a rank's caller only between the fork and the join of that rank.
- All steps of a call come after the fork and before the join by this rank's own order, so a call does not leave its
  caller's stream. Therefore the stream can be captured into a graph, and the caller can free the tensors it passed.
- If the contract of each call's op is given, every output is what the op promises (`values`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .access import bad_accesses, early_reuse, outside_call, wrong_writes
from .graph_order import graph_deadlocks
from .malformed import malformed
from .order import At, Calls, Order, Problem
from .plan import Life, Plan
from .values import Contract, wrong_values
from .verdict import Verdict


@dataclass(frozen=True, slots=True)
class Report(Verdict):
    """The problems that `verify` found; there are none if ``ok``."""

    steps: int
    problems: tuple[Problem, ...]
    graphs: bool = False
    values: bool = False

    def __str__(self) -> str:
        if not self.ok:
            return self.listed()
        graphs = ", nor in any order of a CUDA graph" if self.graphs else ""
        values = " with the right values" if self.values else ""
        return f"{self.steps} steps: no deadlock{graphs}, no race, every output written once{values}"


def verify(
    calls: Calls,
    halves: Sequence[int] | None = None,
    *,
    graphs: bool = False,
    contracts: Sequence[Contract] | None = None,
) -> Report:
    """Check ``calls``, run one after another, for everything in the list at the top of this module.

    Args:
        calls: for each call, the plans of all ranks in rank order. Ops may be mixed.
        halves: for each call, the half of the workspace that it uses. By default calls alternate.
        graphs: whether the calls may be captured in CUDA graphs, each by itself or several in one graph.
        contracts: for each call, what its op promises, such as
            `symm_overlap.collective.planners.ALL_GATHER_MATMUL`. Without them, what the calls compute is not checked.

    Returns:
        A report: ``report.ok`` tells whether the plans hold, ``str(report)`` lists the problems, and
        ``report.raise_for_problems()`` raises if there are any.

    Raises:
        ValueError: ``halves`` or ``contracts`` are not as many as ``calls``, or a half is not 0 or 1.
        TypeError: ``contracts`` is no list of contracts.
    """
    steps = sum(len(plan.steps) for plans in calls for plan in plans)
    problems = tuple(find_problems(calls, halves, graphs=graphs, contracts=contracts))
    return Report(steps, problems, graphs, contracts is not None)


def plan_calls(planner: Callable[..., Plan], world: int, calls: int = 3, **arguments: object) -> list[list[Plan]]:
    """Return the plans of all ranks for ``calls`` calls of one op, one after another.

    Args:
        planner: for instance `symm_overlap.collective.planners.all_gather_consume`.
        world: the world size.
        calls: the number of calls.
        arguments: passed to the planner after the rank and the world size.
    """
    return [[planner(rank, world, **arguments) for rank in range(world)] for _ in range(calls)]


def verify_planner(
    planner: Callable[..., Plan],
    world: int,
    calls: int = 3,
    *,
    graphs: bool = False,
    contract: Contract | None = None,
    **arguments: object,
) -> Report:
    """Check a planner's plans for a world size, run ``calls`` times back to back; see `plan_calls` and `verify`.

    ``contract`` is what the op promises in every call.
    """
    contracts = None if contract is None else [contract] * calls
    return verify(plan_calls(planner, world, calls, **arguments), graphs=graphs, contracts=contracts)


def find_problems(
    calls: Calls,
    halves: Sequence[int] | None = None,
    *,
    graphs: bool = False,
    contracts: Sequence[Contract] | None = None,
) -> Iterator[Problem]:
    """Yield the problems of ``calls`` one by one, so that a caller may stop at the first; arguments as in `verify`."""
    if isinstance(contracts, Contract):
        raise TypeError("contracts is one Contract: give a list with one for each call")
    for contract in contracts or ():
        if not isinstance(contract, Contract):
            raise TypeError(f"contracts has {contract!r}, which is no Contract")
    for name, each in (("halves", halves), ("contracts", contracts)):
        if each is not None and len(each) != len(calls):
            raise ValueError(f"{name} names {len(each)} {name} for {len(calls)} calls: give one for each call")
    if halves is not None and not set(halves) <= {0, 1}:
        raise ValueError(f"halves is {list(halves)}: the workspace has the halves 0 and 1")
    worlds = [len(plans) for plans in calls]
    if not all(worlds) or len(set(worlds)) != 1:
        text = f"the calls have plans of {worlds} ranks: there must be calls, and all need the same number of ranks"
        yield Problem("malformed", (), text)
        return
    found = [problem for call, plans in enumerate(calls) for problem in malformed(call, plans)]
    yield from found
    if found:
        return
    order, holds = Order(calls), True
    for problem in _unsafe(order, halves, graphs):
        holds = False
        yield problem
    if not holds:
        return
    # With a problem above, the ends may have been written for its sake, and values may depend on the order of steps.
    for call, plans in enumerate(calls):
        for problem in _wrong_ends(call, plans):
            holds = False
            yield problem
    if holds and contracts is not None:
        yield from wrong_values(order, contracts)


def _unsafe(order: Order, halves: Sequence[int] | None, graphs: bool) -> Iterator[Problem]:
    """Yield deadlocks, and accesses of memory that come too early, too late, or in no order."""
    calls = order.calls
    yield from _deadlocks(order)
    yield from _miscounted(order)
    yield from bad_accesses(order)
    yield from outside_call(order)
    yield from early_reuse(order, [call % 2 for call in range(len(calls))] if halves is None else halves)
    for call, plans in enumerate(calls):
        yield from wrong_writes(call, plans)
        for plan in plans:
            yield from _leaks(call, plan)
    if graphs and not order.stuck:
        yield from graph_deadlocks(order)


def _wrong_ends(call: int, plans: Sequence[Plan]) -> Iterator[Problem]:
    """Yield what is wrong with the two ends of plans, which stand for the caller: it has written the inputs, and reads
    the outputs. With other ends, plans that compute nothing would hold.
    """
    for plan in plans:
        last = len(plan.steps) - 1
        fork, join = (At(call, plan.rank, index, plan.steps[index]) for index in (0, last))
        for region in fork.step.writes:
            if plan.buffers[region.buffer] is not Life.INPUT:
                text = f"the fork writes {region}, but the caller has written nothing but inputs"
                yield Problem("wrong end", (fork,), text)
        if fork.step.reads or join.step.writes:
            yield Problem("wrong end", (fork, join), "the fork may only write, and the join only read")
    outputs = {buffer for plan in plans for buffer, life in plan.buffers.items() if life is Life.OUTPUT}
    read = {region.buffer for plan in plans for region in plan.steps[-1].reads}
    for buffer in sorted(outputs - read):
        yield Problem("wrong end", (), f"call {call}: no join reads {buffer!r}, which is an output")


def _deadlocks(order: Order) -> Iterator[Problem]:
    """Yield the causes of deadlocks: a stream waits for a step that no rank has, or streams wait for each other in a
    ring. Streams that merely stop behind those are not listed.
    """
    seen: set[int] = set()
    heads = {order.timeline[number]: number for number in order.stuck}
    for start in order.stuck:
        ring: list[int] = []
        number: int | None = start
        while number is not None and number not in seen:
            seen.add(number)
            ring.append(number)
            awaited = order.stuck[number]
            number = None if awaited is None else heads[order.timeline[awaited]]
        if number is None:
            text = "a stream waits for ever: no rank has the step that it waits for"
            yield Problem("deadlock", (order.where[ring[-1]],), text)
        elif number in ring:
            ring = ring[ring.index(number) :]
            text = "each of these waits for the next one, or for a step behind it; the last one waits for the first"
            yield Problem("deadlock", tuple(order.where[number] for number in ring), text)


def _miscounted(order: Order) -> Iterator[Problem]:
    for slot, posts in order.posts.items():
        for number in posts[len(order.awaits.get(slot, ())) :]:
            yield Problem(
                "leftover signal", (order.where[number],), "no wait consumes it, so a later call's wait would"
            )
    ran = set(order.sequence)
    counted = (
        ("signals", "slot", order.posts),
        ("waits", "slot", order.awaits),
        ("barriers", "channel", order.arrivals),
    )
    for kind, where, of in counted:
        for numbers in of.values():
            for first, second in pairwise(number for number in numbers if number in ran):
                if not order.reached_after(first, second):
                    steps = (order.where[first], order.where[second])
                    text = f"one {where} is used on two streams, so either may come first"
                    yield Problem(f"unordered {kind}", steps, text)


def _leaks(call: int, plan: Plan) -> Iterator[Problem]:
    """Yield steps that the rank's own order does not put after the fork, or does not put before the join."""
    before: list[int] = []  # for each step, the bit set of the steps that precede it
    last: dict[str, int] = {}
    for index, step in enumerate(plan.steps):
        local = (*step.after, last[step.stream]) if step.stream in last else step.after
        bits = 0
        for earlier in local:
            bits |= before[earlier] | 1 << earlier
        before.append(bits)
        last[step.stream] = index
        if index and not bits & 1:
            yield Problem("unforked", (At(call, plan.rank, index, step),), "it may start before the call's fork")
    for index in last.values():
        if index != len(before) - 1 and not before[-1] >> index & 1:
            at = At(call, plan.rank, index, plan.steps[index])
            yield Problem("unjoined", (at,), "it may still run after the call's join")
