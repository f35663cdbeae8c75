"""Check every access to memory: ordered with those it conflicts with, and reading what this call wrote.

Accesses are looked at in an order in which they may happen. It is enough to compare each one with the last write of
its unit, and each write also with the reads since then: if all of these are ordered, so is every other pair, through
the writes between.

Buffers of the workspace are looked at twice. Within a call they are like any other buffer. Between calls, each of
which lays out its half anew, any unit may lie where any other has been: `early_reuse` compares whole halves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .kinds import kind
from .order import Order, Problem
from .plan import Life
from .step import Region

_ALL_CALLS = -1  # instead of a call's index: memory that is the same in every call


@dataclass(slots=True)
class _Unit:
    """What happened to one unit of memory."""

    write: int = -1  # the last one
    readers: list[int] = field(default_factory=list)  # since the last write
    fresh: list[int] = field(default_factory=list)  # this call's writes by steps that do not read what was there


def bad_accesses(order: Order) -> Iterator[Problem]:
    """Data races, reads of stale memory or of memory that was freed, and outputs written more than once."""
    units: defaultdict[tuple[str, int, int, int], _Unit] = defaultdict(_Unit)
    for number in order.sequence:
        at = order.where[number]
        step, buffers = at.step, order.calls[at.call][at.rank].buffers
        for region in step.reads:
            life = buffers[region.buffer]
            memory = at.call if life is Life.CALL else _ALL_CALLS
            for index in range(region.start, region.stop):
                unit = units[region.buffer, memory, region.rank, index]
                written = unit.write >= 0 and order.where[unit.write].call == at.call
                if unit.write >= 0 and not order.before(unit.write, number):
                    yield _race(order, unit.write, number, region)
                elif unit.write >= 0 and kind(order.where[unit.write].step.kind).frees:
                    steps = order.where[unit.write], at
                    yield Problem("use after free", steps, f"unit {index} of {region} was freed and not written since")
                elif not written and life is not Life.PERSISTENT:
                    yield Problem("stale read", (at,), f"nothing in this call has written unit {index} of {region}")
                elif written and step.kind == "join" and len(unit.fresh) > 1:
                    writers = tuple(order.where[writer] for writer in unit.fresh)
                    yield Problem("written twice", writers, f"unit {index} of {region}, which the caller reads")
                unit.readers.append(number)
        for region in step.writes:
            memory = at.call if buffers[region.buffer] is Life.CALL else _ALL_CALLS
            for index in range(region.start, region.stop):
                unit = units[region.buffer, memory, region.rank, index]
                earlier = unit.readers if unit.write < 0 else [unit.write, *unit.readers]
                for other in earlier:
                    if other != number and not order.before(other, number):
                        yield _race(order, other, number, region)
                if unit.write < 0 or order.where[unit.write].call != at.call:
                    unit.fresh = []
                if unit.readers[-1:] != [number]:
                    unit.fresh.append(number)
                unit.write = number
                unit.readers = []


def _race(order: Order, first: int, second: int, region: Region) -> Problem:
    steps = tuple(order.where[number] for number in sorted((first, second)))
    return Problem("data race", steps, f"nothing orders these two accesses to {region}")


_Half = tuple[int, int]
"""(which half, rank whose workspace it is a half of)."""


def early_reuse(order: Order, halves: Sequence[int]) -> Iterator[Problem]:
    """Writes to a half of the workspace that do not follow every access of earlier calls to it.

    A stream runs its steps in order, so its first write and its last access stand for all others.
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
    """The numbers of the steps of each call; within a stream they are in its order."""
    members: list[list[int]] = [[] for _ in order.calls]
    for number, at in enumerate(order.where):
        members[at.call].append(number)
    return members
