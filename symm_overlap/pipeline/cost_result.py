"""What the cost simulator found."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..plan.work import TIE, Times
from .action import Action
from .costs import PipelineCosts
from .encoded import NUMBERS, Encoded, parts_of

_COMPUTE = {NUMBERS[kind] for kind in ("F", "I", "W", "B", "OVERLAP_F_B")}
_SENDS = {NUMBERS["SEND_F"]: NUMBERS["RECV_F"], NUMBERS["SEND_B"]: NUMBERS["RECV_B"]}
_OWN = {NUMBERS["UNSHARD"], NUMBERS["REDUCE_GRAD"]}

Interval = tuple[float, float]


class Timed(NamedTuple):
    """An action on the clock."""

    rank: int
    action: Action
    start: float
    end: float


class Memory(NamedTuple):
    """How much memory a rank has in use from some time on."""

    time: float
    activations: float
    parameters: float


@dataclass(frozen=True)
class CostResult:
    """When each action ran, and what follows from it. Units are those of the costs.

    Attributes:
        encoded: the schedule, with its sends and receives.
        costs: what was given.
        times: when each cell started and ended, by its index.
    """

    encoded: Encoded
    costs: PipelineCosts
    times: Times

    @cached_property
    def makespan(self) -> float:
        """From the beginning to the end of the last action on any rank."""
        return max(self.times.ends, default=0.0)

    @cached_property
    def spans(self) -> tuple[Interval, ...]:
        """For each rank, the start of its first and the end of its last compute; (0, 0) without any."""
        return tuple((busy[0][0], busy[-1][1]) if busy else (0.0, 0.0) for busy in self._compute)

    @property
    def longest_span(self) -> float:
        """The longest time from the start of a rank's first compute to the end of its last."""
        return max((stop - start for start, stop in self.spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, how long it computes."""
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self._compute)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank, how long it does not compute, from the beginning to the end of the last rank."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubbles_in_span(self) -> tuple[float, ...]:
        """For each rank, how long it does not compute between the start of its first and the end of its last."""
        return tuple(stop - start - busy for (start, stop), busy in zip(self.spans, self.busy, strict=True))

    @cached_property
    def exposed(self) -> tuple[float, ...]:
        """For each rank, how long it communicates without computing: sends, is sent to, gathers or reduces."""
        moving: list[list[Interval]] = [[] for _ in range(self.encoded.ranks)]
        receiver: dict[int, int] = {}  # the rank of each receive
        for rank, number, kind in self._cells():
            if kind in _SENDS.values():
                receiver[number] = rank
        of_send = {self.times.causes[recv]: rank for recv, rank in receiver.items()}
        for rank, number, kind in self._cells():
            interval = (self.times.starts[number], self.times.ends[number])
            if kind in _OWN or kind in _SENDS:
                moving[rank].append(interval)
            if number in of_send:
                moving[of_send[number]].append(interval)
        return tuple(
            _length([*moves, *computes]) - _length(computes)
            for moves, computes in zip(moving, self._compute, strict=True)
        )

    @cached_property
    def critical_path(self) -> tuple[Timed, ...]:
        """Actions from the beginning to the end of the last, each started by what happened to the one before it."""
        path: list[int] = []
        number = max(range(len(self.times.ends)), key=self.times.ends.__getitem__, default=-1)
        while number >= 0:
            path.append(number)
            number = self.times.causes[number]
        return tuple(self.timed(number) for number in reversed(path))

    def timed(self, number: int) -> Timed:
        """The action of a cell, by its index, on the clock."""
        rank = bisect_right(self.encoded.starts, number) - 1
        action = self.encoded.action(self.encoded.cells[number])
        assert action is not None, "an empty cell has no times"
        return Timed(rank, action, self.times.starts[number], self.times.ends[number])

    def memory(self, rank: int) -> tuple[Memory, ...]:
        """How much a rank has in use over time, from each change on.

        Activations come with the start of a forward and go with the end of the full backward; where the backward is
        split, some go with the end of I (`PipelineCosts.kept`) and the rest with the end of W. Parameters come with the
        start of UNSHARD and go with RESHARD; a rank that never gathers has those of its stages all the time.
        """
        stages = len(self.encoded.placement)
        activation, kept, parameters = (self.costs.each(name, stages) for name in ("activation", "kept", "parameters"))
        changes: list[tuple[float, float, float]] = []
        gathers = False
        for number in range(self.encoded.starts[rank], self.encoded.starts[rank + 1]):
            start, end = self.times.starts[number], self.times.ends[number]
            for kind, stage, _ in parts_of(self.encoded.cells[number], self.encoded.parts):
                if kind == NUMBERS["F"]:
                    changes.append((start, activation[stage], 0.0))
                elif kind == NUMBERS["B"]:
                    changes.append((end, -activation[stage], 0.0))
                elif kind == NUMBERS["I"]:
                    changes.append((end, kept[stage] - activation[stage], 0.0))
                elif kind == NUMBERS["W"]:
                    changes.append((end, -kept[stage], 0.0))
                elif kind == NUMBERS["UNSHARD"]:
                    gathers = True
                    changes.append((start, 0.0, parameters[stage]))
                elif kind == NUMBERS["RESHARD"]:
                    changes.append((end, 0.0, -parameters[stage]))
        whole = sum(size for stage, size in enumerate(parameters) if self.encoded.placement[stage] == rank)
        return _summed(changes, 0.0 if gathers else whole)

    def peak_memory(self, rank: int) -> float:
        """The most that a rank has in use at a time, activations and parameters together."""
        return max((use.activations + use.parameters for use in self.memory(rank)), default=0.0)

    @cached_property
    def _compute(self) -> list[list[Interval]]:
        """For each rank, when it computes; in order, since one stream does."""
        found: list[list[Interval]] = [[] for _ in range(self.encoded.ranks)]
        for rank, number, kind in self._cells():
            if kind in _COMPUTE:
                found[rank].append((self.times.starts[number], self.times.ends[number]))
        return found

    def _cells(self) -> Iterable[tuple[int, int, int]]:
        """(rank, index, number of the kind) of every cell."""
        for rank in range(self.encoded.ranks):
            for number in range(self.encoded.starts[rank], self.encoded.starts[rank + 1]):
                yield rank, number, self.encoded.cells[number] >> 48


def _length(intervals: Iterable[Interval]) -> float:
    """How long any of some intervals lasts."""
    total, reached = 0.0, 0.0
    for start, stop in sorted(intervals):
        if stop > reached:
            total += stop - max(start, reached)
            reached = stop
    return total


def _summed(changes: list[tuple[float, float, float]], parameters: float) -> tuple[Memory, ...]:
    """What is in use from each change on. What goes at a time goes before what comes at it; the clock takes times that
    are as close as `TIE` for one.
    """
    changes.sort()
    in_use = [Memory(0.0, 0.0, parameters)]
    first = 0
    while first < len(changes):
        time = changes[first][0]
        last = next((at for at in range(first, len(changes)) if changes[at][0] > time + TIE), len(changes))
        before = in_use.pop() if in_use[-1].time == time else in_use[-1]
        activations = before.activations + sum(change for _, change, _ in changes[first:last])
        gathered = before.parameters + sum(change for *_, change in changes[first:last])
        in_use.append(Memory(time, activations, gathered))
        first = last
    return tuple(in_use)
