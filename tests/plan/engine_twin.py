"""Runs work on a clock in plain Python. It is the twin of csrc/sim/engine.cpp and gives bitwise the same times."""

from __future__ import annotations

import heapq
from itertools import pairwise
from math import isfinite
from typing import TypeVar

from symm_overlap.plan.work import TIE, Times, Work, doubles, integers

T = TypeVar("T", int, float)


def run(work: Work) -> Times:
    """Return the times of all work; see `symm_overlap.plan.work`. The lengths of the arrays are not checked.

    Raises:
        ValueError: a duration, a lot or a slow-down is not allowed.
    """
    _require_durations(work)
    return _Run(work).times()


def _require_durations(work: Work) -> None:
    """Raise ValueError for durations that a clock cannot run: it would never go on if it met NaN."""
    slowest = max([1.0, *work.slow_down])
    if not all(isfinite(slow_down) and slow_down >= 1.0 for slow_down in work.slow_down):
        raise ValueError("a slow-down must be finite and at least 1")
    if not all(duration >= 0.0 for duration in (*work.body, *work.tail)):
        raise ValueError("a duration must be a number that is at least 0")
    if not isfinite(slowest * sum(work.body) + sum(work.tail)):
        raise ValueError("the durations add up to more than a float can hold: give them in larger units")
    if not all(map(isfinite, work.lots)):
        raise ValueError("a lot must be finite")


class _Run:
    """One run. Work is ready when everything it waits for is done; then it acquires its resources."""

    def __init__(self, work: Work) -> None:
        count = len(work.stream)
        self._work = work
        self._after = _lists(work.after_starts, work.after)
        self._holds = _lists(work.holds_starts, work.holds)
        self._lots = [iter(lots) for lots in _lists(work.lot_starts, work.lots)]
        self._followers: list[list[int]] = [[] for _ in range(count)]
        self._obstacles = [0] * count
        self._next: dict[int, int] = {}  # the next work in the same stream
        self._starts, self._ends, self._reached = ([0.0] * count for _ in range(3))
        self._causes = [-1] * count
        self._order: list[int] = []
        self._heap: list[tuple[float, int, bool, int]] = []  # (time, work, True: done, False: body over, version)
        self._queue: list[tuple[float, float, int]] = []  # (ready at, lot, work)
        self._in_use: set[int] = set()
        self._released_by: dict[int, int] = {}  # by first resource: work that released what the queue's head awaited
        self._waits_for: dict[int, int] = {}  # by first resource: the resource that the head of its queue waits for
        self._loaded = [0] * len(work.slow_down)
        self._running: list[list[int]] = [[] for _ in work.slow_down]  # by group: the slowed work that is running
        self._left, self._since, self._version = [0.0] * count, [0.0] * count, [0] * count
        self._find_obstacles()
        self._run()

    def times(self) -> Times:
        """Return the times of the finished run."""
        return Times(
            doubles(self._starts),
            doubles(self._ends),
            doubles(self._reached),
            integers(self._causes),
            integers(self._order),
        )

    def _find_obstacles(self) -> None:
        last: dict[int, int] = {}
        for number, stream in enumerate(self._work.stream):
            for earlier in self._after[number]:
                self._obstacles[number] += 1
                if earlier >= 0:
                    self._followers[earlier].append(number)
            if stream in last:
                self._next[last[stream]] = number
                self._obstacles[number] += 1
            last[stream] = number
        for earlier, number in self._next.items():
            self._followers[earlier].append(number)

    def _run(self) -> None:
        for number, obstacles in enumerate(self._obstacles):
            if not obstacles:
                self._ready(number, 0.0)
        self._serve(0.0)
        while self._heap:
            now = self._heap[0][0]
            while self._heap and self._heap[0][0] <= now + TIE:  # process all ends before anything starts
                _, number, done, version = heapq.heappop(self._heap)
                if version != self._version[number]:
                    continue  # its pace has changed since this entry was pushed
                if done:
                    self._done(number, now)
                else:
                    self._give_up(number, now)
            self._serve(now)

    def _ready(self, number: int, now: float) -> None:
        if not self._holds[number]:
            self._start(number, now)
            return
        lottery = self._work.lottery[number]
        entry = (now, next(self._lots[lottery]) if lottery >= 0 else 0.0, number)
        self._queue.append(entry)
        first = self._holds[number][0]
        if entry == min(self._queue_of(first)):
            self._waits_for.pop(first, None)

    def _queue_of(self, first: int) -> list[tuple[float, float, int]]:
        """Return the queued work whose first resource is ``first``."""
        return [entry for entry in self._queue if self._holds[entry[-1]][0] == first]

    def _serve(self, now: float) -> None:
        """Start all work that can start, the oldest first, but none ahead of older work on the same first resource."""
        passed: set[int] = set()
        for entry in sorted(self._queue):
            number = entry[-1]
            first = self._holds[number][0]
            if first not in passed and first not in self._waits_for:
                busy = next((resource for resource in self._holds[number] if resource in self._in_use), None)
                if busy is not None:
                    self._waits_for[first] = busy
                else:
                    self._queue.remove(entry)
                    self._in_use.update(self._holds[number])
                    if entry[0] < now and first in self._released_by:
                        self._causes[number] = self._released_by[first]
                    if self._queue_of(first):
                        self._waits_for[first] = first
                    self._start(number, now)
            passed.add(first)

    def _start(self, number: int, now: float) -> None:
        self._order.append(number)
        self._starts[number] = now
        body, group = self._work.body[number], self._work.slowed[number]
        if group >= 0:
            self._running[group].append(number)
            self._left[number], self._since[number] = body, now
            if self._loaded[group]:
                body *= self._work.slow_down[group]
        self._ends[number] = now + body + self._work.tail[number]
        heapq.heappush(self._heap, (self._ends[number], number, True, self._version[number]))
        loads = self._work.loads[number]
        if self._holds[number] or loads >= 0:
            heapq.heappush(self._heap, (now + body, number, False, self._version[number]))
        if loads >= 0:
            self._loaded[loads] += 1
            if self._loaded[loads] == 1:
                self._change_pace(loads, now)

    def _give_up(self, number: int, now: float) -> None:
        """The body is over: release the resources, and stop loading the group."""
        for resource in self._holds[number]:
            self._in_use.discard(resource)
            for first in [first for first, awaited in self._waits_for.items() if awaited == resource]:
                del self._waits_for[first]
                self._released_by[first] = number
        loads = self._work.loads[number]
        if loads >= 0:
            self._loaded[loads] -= 1
            if not self._loaded[loads]:
                self._change_pace(loads, now)

    def _change_pace(self, group: int, now: float) -> None:
        """Update the slowed work of a group: the first work that loads the group has started, or the last has ended."""
        slow = self._work.slow_down[group]
        before, after = (1.0, slow) if self._loaded[group] else (slow, 1.0)
        if before == after:
            return
        for number in self._running[group]:
            self._left[number] = max(0.0, self._left[number] - (now - self._since[number]) / before)
            self._since[number] = now
            self._ends[number] = now + self._left[number] * after
            self._version[number] += 1
            heapq.heappush(self._heap, (self._ends[number], number, True, self._version[number]))

    def _done(self, number: int, now: float) -> None:
        group = self._work.slowed[number]
        if group >= 0:
            self._running[group].remove(number)
        if number in self._next:
            self._reached[self._next[number]] = now
        for later in self._followers[number]:
            self._causes[later] = number
            self._obstacles[later] -= 1
            if not self._obstacles[later]:
                self._ready(later, now)


def _lists(starts: memoryview[int], flat: memoryview[T]) -> list[list[T]]:
    return [list(flat[start:stop]) for start, stop in pairwise(starts)]
