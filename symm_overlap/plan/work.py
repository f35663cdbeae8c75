"""Work to be run on a simulated clock, as arrays. Chunks, layers and pipeline stages are all simulated in this form.

Each piece of work is identified by its number. It may start once the work before it in its stream, and all work that it
is after, is done. It has a body, during which it holds its resources, and a tail, during which it does not. Work that
needs resources starts once all of them are free, and holds none of them before it starts.

Resources are served first come, first served: nothing starts ahead of older work on the same first resource. Among
different first resources, whichever work can start does so, the oldest first. Of work that became ready at the same
time, the one with the lower lot starts first, and of equal lots the one with the lower number.

Work may slow other work down. While any work that loads a group is in its body, all work that is slowed in this group
takes longer by the group's factor.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sized
from typing import NamedTuple

from .. import _sim

TIE = 1e-9
"""Times that differ by at most this much count as the same."""


class Work(NamedTuple):
    """Work to be run, as views of 64-bit integers and doubles.

    Arrays have one entry for each piece of work, unless stated otherwise.

    Attributes:
        stream: the stream that runs the work, from 0. A stream runs its work in the order of the numbers.
        after_starts, after: ``after[after_starts[n]:after_starts[n + 1]]`` is the work that n is after; -1 is work that
            never comes.
        holds_starts, holds: in the same form, the resources that n holds, numbered from 0. Work with the same first
            resource forms a queue.
        body, tail: durations, in any unit in which 1e-9 is negligible. They are at least 0, and their sum is finite.
        lottery: the lottery from which the work draws its lot when it becomes ready; -1: its lot is 0.
        lot_starts, lots: in the same form, the lots of each lottery, in the order in which they are drawn.
        loads: the group that the work loads during its body; -1: none.
        slowed: the group in which the work is slowed; -1: none. Work that is slowed holds nothing, loads nothing and
            has no tail.
        slow_down: for each group, the factor, at least 1, by which its slowed work takes longer while the group is
            loaded.
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
    """The times at which work ran. Arrays have one entry for each piece of work, except ``order``.

    Attributes:
        starts, ends: start and end times; 0 for work that never starts.
        reached: when the work before it in its stream was done.
        causes: the work whose end allowed this work to start: work that it was after, or work that held its resources;
            -1: none.
        order: the numbers of all work that started, in order of start.
    """

    starts: memoryview[float]
    ends: memoryview[float]
    reached: memoryview[float]
    causes: memoryview[int]
    order: memoryview[int]


def run(work: Work) -> Times:
    """Run work on a clock. The same work always gives the same times. Work in a ring of dependencies never starts.

    Raises:
        ValueError: the lengths of the arrays do not match each other, or a number is not allowed.
    """
    starts, ends, reached, causes, order = _sim.run(work)
    return Times(
        memoryview(starts).cast("d"),
        memoryview(ends).cast("d"),
        memoryview(reached).cast("d"),
        memoryview(causes).cast("q"),
        memoryview(order).cast("q"),
    )


def integers(values: bytes | Iterable[int]) -> memoryview[int]:
    """Return a read-only view of 64-bit integers, from bytes that contain them (not copied) or from numbers."""
    return memoryview(values if isinstance(values, bytes) else array("q", values).tobytes()).cast("q")


def doubles(values: Iterable[float]) -> memoryview[float]:
    """Return a read-only view of doubles."""
    return memoryview(array("d", values).tobytes()).cast("d")


def starts_of(lists: Iterable[Sized]) -> list[int]:
    """Return where each list starts when the lists are concatenated, followed by where the last one ends."""
    starts = [0]
    for each in lists:
        starts.append(starts[-1] + len(each))
    return starts
