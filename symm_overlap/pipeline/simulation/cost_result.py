"""The result of the cost simulator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...plan.work import TIE, Times
from ..action import Action
from .costs import PipelineCosts
from .encoded import NUMBERS, Encoded, fields, parts_of

_COMPUTE = {NUMBERS[kind] for kind in ("F", "I", "W", "B", "OVERLAP_F_B")}
_SENDS = {NUMBERS["SEND_F"]: NUMBERS["RECV_F"], NUMBERS["SEND_B"]: NUMBERS["RECV_B"]}
_OWN = {NUMBERS["UNSHARD"], NUMBERS["REDUCE_GRAD"]}

Interval = tuple[float, float]


class Timed(NamedTuple):
    """An action, with the rank that ran it and the time at which it started and ended."""

    rank: int
    action: Action
    start: float
    end: float


class Memory(NamedTuple):
    """How much memory a rank uses from ``time`` on."""

    time: float
    activations: float
    parameters: float


@dataclass(frozen=True)
class CostResult:
    """When each action ran, and what follows from that. All figures are in the units of the costs.

    Attributes:
        encoded: the schedule, with its sends and receives.
        costs: the costs that were passed to `simulate_cost`.
        times: for each cell, by its index, when it started and ended.
    """

    encoded: Encoded
    costs: PipelineCosts
    times: Times

    @cached_property
    def makespan(self) -> float:
        """The time from the start of the step to the end of the last action on any rank."""
        return max(self.times.ends, default=0.0)

    @cached_property
    def spans(self) -> tuple[Interval, ...]:
        """For each rank, the start of its first and the end of its last compute action; (0, 0) if it has none."""
        return tuple((busy[0][0], busy[-1][1]) if busy else (0.0, 0.0) for busy in self._compute)

    @property
    def longest_span(self) -> float:
        """The longest time on any rank from the start of its first compute action to the end of its last."""
        return max((stop - start for start, stop in self.spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, how long it computes."""
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self._compute)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank, how long it does not compute during the whole step (`makespan`)."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubbles_in_span(self) -> tuple[float, ...]:
        """For each rank, how long it does not compute between its first and its last compute action (`spans`)."""
        return tuple(stop - start - busy for (start, stop), busy in zip(self.spans, self.busy, strict=True))

    @cached_property
    def exposed(self) -> tuple[float, ...]:
        """For each rank, how long it communicates without computing. Sends, receives, gathers and reductions count."""
        moving: list[list[Interval]] = [[] for _ in range(self.encoded.ranks)]
        transfers: dict[tuple[int, int, int], Interval] = {}  # the send of each message, by the fields of its receive
        for rank, number, kind in self._cells():
            if kind in _OWN or kind in _SENDS:
                moving[rank].append((self.times.starts[number], self.times.ends[number]))
            if kind in _SENDS:
                _, stage, microbatch = fields(self.encoded.cells[number])
                receiver = stage + (1 if kind == NUMBERS["SEND_F"] else -1)
                transfers[_SENDS[kind], receiver, microbatch] = moving[rank][-1]
        # A receive may end later than its send, behind another receive. The message travels during the send.
        for rank, number, kind in self._cells():
            if kind in _SENDS.values():
                moving[rank].append(transfers[fields(self.encoded.cells[number])])
        return tuple(
            _length([*moves, *computes]) - _length(computes)
            for moves, computes in zip(moving, self._compute, strict=True)
        )

    @cached_property
    def critical_path(self) -> tuple[Timed, ...]:
        """The chain of actions that ends with the last action of the step. Each one waited for the one before it."""
        path: list[int] = []
        number = max(range(len(self.times.ends)), key=self.times.ends.__getitem__, default=-1)
        while number >= 0:
            path.append(number)
            number = self.times.causes[number]
        return tuple(self.timed(number) for number in reversed(path))

    def timed(self, number: int) -> Timed:
        """Return the action of a cell, given by its index, and its times."""
        rank = bisect_right(self.encoded.starts, number) - 1
        action = self.encoded.action(self.encoded.cells[number])
        assert action is not None, "an empty cell has no times"
        return Timed(rank, action, self.times.starts[number], self.times.ends[number])

    def memory(self, rank: int) -> tuple[Memory, ...]:
        """Return how much memory a rank uses over time: one entry for each change.

        Activations are allocated at the start of a forward, and freed at the end of the full backward. If the backward
        is split, some are freed at the end of I and the rest (`PipelineCosts.kept`) at the end of W. Parameters are
        allocated at the start of UNSHARD and freed by RESHARD. A rank that never gathers has the parameters of all its
        stages in memory during the whole step.
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
        """Return the most memory that a rank uses at one time, for activations and parameters together."""
        return max((use.activations + use.parameters for use in self.memory(rank)), default=0.0)

    @cached_property
    def _compute(self) -> list[list[Interval]]:
        """For each rank, the intervals in which it computes. They are in order, since one stream runs them."""
        found: list[list[Interval]] = [[] for _ in range(self.encoded.ranks)]
        for rank, number, kind in self._cells():
            if kind in _COMPUTE:
                found[rank].append((self.times.starts[number], self.times.ends[number]))
        return found

    def _cells(self) -> Iterable[tuple[int, int, int]]:
        """Yield (rank, index, number of the kind) of every cell."""
        for rank in range(self.encoded.ranks):
            for number in range(self.encoded.starts[rank], self.encoded.starts[rank + 1]):
                yield rank, number, self.encoded.cells[number] >> 48


def _length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of some intervals."""
    total, reached = 0.0, 0.0
    for start, stop in sorted(intervals):
        if stop > reached:
            total += stop - max(start, reached)
            reached = stop
    return total


def _summed(changes: list[tuple[float, float, float]], parameters: float) -> tuple[Memory, ...]:
    """Return the memory in use from each change on.

    Changes at the same time are summed into one entry. Times that are at most `TIE` apart count as the same, as on the
    clock.
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
