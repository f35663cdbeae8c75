"""Check every access to memory: ordered with those it conflicts with, and reading what this call wrote.

Accesses are looked at in an order in which they may happen. It is enough to compare each one with the last write of
its unit, and each write also with the reads since then: if all of these are ordered, so is every other pair, through
the writes between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from .order import Order, Problem
from .step import Region


@dataclass(slots=True)
class _Unit:
    """What happened to one unit of memory."""

    write: int = -1  # the last one
    readers: list[int] = field(default_factory=list)  # since the last write
    fresh: list[int] = field(default_factory=list)  # this call's writes by steps that do not read what was there


def bad_accesses(order: Order) -> Iterator[Problem]:
    """Data races, reads of stale memory, and outputs written more than once."""
    units: defaultdict[tuple[str, int, int], _Unit] = defaultdict(_Unit)
    for number in order.sequence:
        at = order.where[number]
        step = at.step
        for region in step.reads:
            for index in range(region.start, region.stop):
                unit = units[region.buffer, region.rank, index]
                if unit.write >= 0 and not order.before(unit.write, number):
                    yield _race(order, unit.write, number, region)
                elif unit.write < 0 or order.where[unit.write].call != at.call:
                    yield Problem("stale read", (at,), f"nothing in this call has written unit {index} of {region}")
                elif step.kind == "join" and len(unit.fresh) > 1:
                    writers = tuple(order.where[writer] for writer in unit.fresh)
                    yield Problem("written twice", writers, f"unit {index} of {region}, which the caller reads")
                unit.readers.append(number)
        for region in step.writes:
            for index in range(region.start, region.stop):
                unit = units[region.buffer, region.rank, index]
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
