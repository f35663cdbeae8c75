"""Work on a clock, as arrays: what chunks, layers and stages are all simulated as, and what comes out.

A piece of work is known by its number. It may start once the work before it in its stream, and all work that it is
after, is done. It has a body, during which it holds its resources, and a tail, during which it does not. Work that
needs resources starts once all of them are free, and holds nothing before. First come, first served: nothing starts
ahead of older work on the same first resource; among different first resources whoever can start does, the oldest
first. Of work that came at the same time the one with the lower lot starts, then the one with the lower number.

Work may slow others down: while any work that loads a group is in its body, the work that is slowed in this group takes
so many times as long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sized
from typing import NamedTuple

from .. import _sim

TIE = 1e-9
"""Times this close are the same."""


class Work(NamedTuple):
    """Work to be run, as views of 64-bit integers and doubles. Arrays have one entry a piece of work, if not said else.

    Attributes:
        stream: the stream that runs it, from 0; a stream runs its work in the order of its numbers.
        after_starts, after: ``after[after_starts[n]:after_starts[n + 1]]`` is the work that n is after; -1 is work that
            never comes.
        holds_starts, holds: likewise the resources that n holds, from 0. Those with the same first one form a queue.
        body, tail: how long it takes, in any unit, in which 1e-9 is no time at all.
        lottery: from which lottery it draws its lot when it becomes ready; -1: its lot is 0.
        lot_starts, lots: likewise the lots of each lottery, in the order in which they are drawn.
        loads: the group that it loads during its body; -1: none.
        slowed: the group that it is slowed in; -1: none. Work that is slowed holds nothing, loads nothing and has no
            tail.
        slow_down: for each group, how many times as long its slowed work takes while the group is loaded.
    """

    stream: memoryview[int]
    after_starts: memoryview[int]
    after: memoryview[int]
    holds_starts: memoryview[int]
    holds: memoryview[int]
    body: memoryview[float]
    tail: memoryview[float]
    lottery: memoryview[int]
    lot_starts: memoryview[int]
    lots: memoryview[float]
    loads: memoryview[int]
    slowed: memoryview[int]
    slow_down: memoryview[float]


class Times(NamedTuple):
    """When work was run.

    Attributes:
        starts, ends: of each piece of work; 0 for what never starts.
        reached: when the work before it in its stream was done.
        causes: the work that it started right behind: what it was after, or what held its resources; -1: none.
        order: the numbers of all that started, in order of start.
    """

    starts: memoryview[float]
    ends: memoryview[float]
    reached: memoryview[float]
    causes: memoryview[int]
    order: memoryview[int]


def run(work: Work) -> Times:
    """Run work on a clock. The same work, the same times; work in a ring of dependencies never starts.

    `symm_overlap.plan.engine` does the same in plain Python.

    Raises:
        ValueError: arrays that do not fit each other.
    """
    starts, ends, reached, causes, order = _sim.run(work)
    return Times(
        memoryview(starts).cast("d"),
        memoryview(ends).cast("d"),
        memoryview(reached).cast("d"),
        memoryview(causes).cast("q"),
        memoryview(order).cast("q"),
    )


def integers(values: Iterable[int]) -> memoryview[int]:
    """A view of 64-bit integers that cannot be written to."""
    return memoryview(array("q", values).tobytes()).cast("q")


def doubles(values: Iterable[float]) -> memoryview[float]:
    """A view of doubles that cannot be written to."""
    return memoryview(array("d", values).tobytes()).cast("d")


def starts_of(lists: Iterable[Sized]) -> list[int]:
    """Where each list starts once all stand one behind another, and where the last one ends."""
    starts = [0]
    for each in lists:
        starts.append(starts[-1] + len(each))
    return starts
