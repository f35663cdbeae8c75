"""Check every access to memory: it must be ordered against conflicting accesses, and must not read stale data.

Accesses are visited in one order in which they may happen. Each access is compared with the last write of its unit, and
each write also with the reads since that write. This is enough: if all these pairs are ordered, every other pair is
ordered too, through the writes between them.

The memory of a rank's caller belongs to the call only from that rank's fork to its join. `outside_call` checks that no
peer touches it before or after. `wrong_writes` checks that inputs stay as they are, and that whatever is written to an
output is part of what the join hands over.

Buffers of the workspace are checked twice. Within a call they are checked like any other buffer. Each call lays out its
half of the workspace anew, so any unit of one call may be stored where any unit of an earlier call was. Between calls,
`early_reuse` therefore compares whole halves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .kinds import kind
from .order import At, Order, Problem
from .plan import Life, Plan
from .step import Region

_ALL_CALLS = -1  # in place of a call's index, for memory that is the same in every call


@dataclass(slots=True)
class _Unit:
    """The accesses to one unit of memory so far."""

    write: int = -1  # the last write
    readers: list[int] = field(default_factory=list)  # since the last write
    fresh: list[int] = field(default_factory=list)  # writes in this call by steps that do not read the unit first


_Units = defaultdict[tuple[str, int, int, int], _Unit]
"""By buffer, call, rank and index."""


def bad_accesses(order: Order) -> Iterator[Problem]:
    """Yield data races, reads of stale or freed memory, and outputs that are written more than once."""
    units: _Units = defaultdict(_Unit)
    for number in order.sequence:
        yield from _bad_reads(order, number, units)
        yield from _bad_writes(order, number, units)


def _bad_reads(order: Order, number: int, units: _Units) -> Iterator[Problem]:
    """Yield the problems of what a step reads, and note that it has read."""
    at = order.where[number]
    buffers = order.calls[at.call][at.rank].buffers
    for region in at.step.reads:
        life = buffers[region.buffer]
        memory = at.call if life is Life.CALL else _ALL_CALLS
        for index in range(region.start, region.stop):
            unit = units[region.buffer, memory, region.rank, index]
            written = unit.write >= 0 and order.where[unit.write].call == at.call
            if unit.write >= 0 and not order.before(unit.write, number):
                yield _race(order, unit.write, number, region)
            elif unit.write >= 0 and kind(order.where[unit.write].step.kind).frees:
                steps = order.where[unit.write], at
                yield Problem("use after free", steps, f"unit {index} of {region} was freed and not rewritten")
            elif not written and life is not Life.PERSISTENT:
                yield Problem("stale read", (at,), f"nothing in this call has written unit {index} of {region}")
            elif written and at.step.kind == "join" and len(unit.fresh) > 1:
                writers = tuple(order.where[writer] for writer in unit.fresh)
                yield Problem("written twice", writers, f"unit {index} of {region} is an output and has several writes")
            unit.readers.append(number)


def _bad_writes(order: Order, number: int, units: _Units) -> Iterator[Problem]:
    """Yield the races of what a step writes, and note that it has written. To be called after `_bad_reads`."""
    at = order.where[number]
    buffers = order.calls[at.call][at.rank].buffers
    for region in at.step.writes:
        memory = at.call if buffers[region.buffer] is Life.CALL else _ALL_CALLS
        for index in range(region.start, region.stop):
            unit = units[region.buffer, memory, region.rank, index]
            earlier = unit.readers if unit.write < 0 else [unit.write, *unit.readers]
            for other in earlier:
                if other != number and not order.before(other, number):
                    yield _race(order, other, number, region)
            if unit.write < 0 or order.where[unit.write].call != at.call:
                unit.fresh = []
            # A collective that has arrived and leaves has two numbers.
            again = unit.write not in (-1, number) and order.where[unit.write] is at
            if unit.readers[-1:] != [number] and not again:
                unit.fresh.append(number)
            unit.write = number
            unit.readers = []


def _race(order: Order, first: int, second: int, region: Region) -> Problem:
    steps = tuple(order.where[number] for number in sorted((first, second)))
    return Problem("data race", steps, f"nothing orders these two accesses to {region}")


def outside_call(order: Order) -> Iterator[Problem]:
    """Yield accesses to a peer's inputs and outputs that may come before the peer's fork or after its join.

    The caller may still use an output before the fork, and may overwrite or free an input after the join. No step of a
    plan stands for that. A rank's own steps are not considered, since `verify` requires that they come after its fork
    and before its join.
    """
    ran = set(order.sequence)
    for members in _by_call(order):
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for number in members:
            numbers[order.where[number].rank].append(number)
        for number in members:
            at = order.where[number]
            if number not in ran:
                continue
            buffers = order.calls[at.call][at.rank].buffers
            for region in at.step.reads + at.step.writes:
                if region.rank == at.rank or buffers[region.buffer] not in (Life.INPUT, Life.OUTPUT):
                    continue
                fork, join = numbers[region.rank][0], numbers[region.rank][-1]
                if not order.before(fork, number):
                    text = f"{region} belongs to the caller, who may still use it before this fork"
                    yield Problem("before the call", (order.where[fork], at), text)
                if join in ran and not order.before(number, join):
                    text = f"{region} belongs to the caller, who may overwrite or free it after this join"
                    yield Problem("after the call", (at, order.where[join]), text)


def wrong_writes(call: int, plans: Sequence[Plan]) -> Iterator[Problem]:
    """Yield writes to inputs, and writes to outputs beyond what their rank's join reads."""
    handed_over = {
        (region.buffer, region.rank, unit)
        for plan in plans
        for region in plan.steps[-1].reads
        for unit in range(region.start, region.stop)
    }
    for plan in plans:
        for index, step in enumerate(plan.steps[1:], 1):  # what the fork writes is what the caller has written
            for region in step.writes:
                life, at = plan.buffers[region.buffer], At(call, plan.rank, index, step)
                if life is Life.INPUT:
                    yield Problem("write to an input", (at,), f"{region} belongs to the caller, who wants it unchanged")
                elif life is Life.OUTPUT:
                    units = range(region.start, region.stop)
                    beyond = [unit for unit in units if (region.buffer, region.rank, unit) not in handed_over]
                    if beyond:
                        text = f"unit {beyond[0]} of {region} is not part of the output that the join reads"
                        yield Problem("write beyond an output", (at,), text)


_Half = tuple[int, int]
"""(half of the workspace, rank whose workspace it is)."""


def early_reuse(order: Order, halves: Sequence[int]) -> Iterator[Problem]:
    """Yield writes to a half of the workspace that may come before an access of an earlier call to the same half.

    A stream runs its steps in order, so only its first write and its last access in a call have to be compared.
    """
    ran = set(order.sequence)
    accessed: defaultdict[_Half, dict[int, tuple[int, Region]]] = defaultdict(dict)  # by timeline, the last access
    for members in _by_call(order):
        first: defaultdict[_Half, dict[int, tuple[int, Region]]] = defaultdict(dict)  # by timeline, the first write
        last: defaultdict[_Half, dict[int, tuple[int, Region]]] = defaultdict(dict)
        for number in members:
            at = order.where[number]
            step, timeline = at.step, order.timeline[number]
            if not (step.reads or step.writes) or number not in ran:
                continue
            buffers = order.calls[at.call][at.rank].buffers
            for region in step.reads:
                if buffers[region.buffer] is Life.CALL:
                    last[halves[at.call], region.rank][timeline] = number, region
            for region in step.writes:
                if buffers[region.buffer] is Life.CALL:
                    last[halves[at.call], region.rank][timeline] = number, region
                    first[halves[at.call], region.rank].setdefault(timeline, (number, region))
        for half, writes in first.items():
            for write, target in writes.values():
                for access, region in accessed[half].values():
                    if not order.before(access, write):
                        steps = order.where[access], order.where[write]
                        text = f"the write to {target} reuses the half of the workspace where {region} may be in use"
                        yield Problem("data race", steps, text)
        for half, accesses in last.items():
            accessed[half].update(accesses)


def _by_call(order: Order) -> list[list[int]]:
    """Return the numbers of each call's steps. Steps of one stream are in the order of that stream."""
    members: list[list[int]] = [[] for _ in order.calls]
    for number, at in enumerate(order.where):
        members[at.call].append(number)
    return members
