"""Find out which call and which step launched each activity, and create the recordings of a trace.

A profiler gives an activity of a GPU and the call of the driver that launched it the same number. That call happened
on a thread of the host, within the ranges of a step and of a call of an op. On a CPU, the ranges of steps are the
activities.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..collective import RANGE_OF_CALL, called
from ..collective.problem import Problem
from ..plan import Step
from ..plan.ranges import PREFIX as RANGE_OF_STEP
from ..plan.ranges import step_of
from .recording import Activity, RecordedCall, Recording, in_order
from .roles import role_of


class Range(NamedTuple):
    """A range on a thread of the host. Times are in milliseconds, as in all these records."""

    process: Hashable
    thread: Hashable
    start: float
    end: float
    name: str

    @property
    def is_call(self) -> bool:
        """Whether it is around a call."""
        return self.name.startswith(RANGE_OF_CALL)


class Launch(NamedTuple):
    """A call of the driver. It launched the activities with the same process and ``number``."""

    process: Hashable
    thread: Hashable
    time: float
    number: int


class Run(NamedTuple):
    """An activity of a GPU."""

    process: Hashable
    device: int
    stream: str
    start: float
    end: float
    name: str
    number: int


def is_ours(name: str) -> bool:
    """True for the name of a range of ours."""
    return name.startswith((RANGE_OF_CALL, RANGE_OF_STEP))


def recordings(
    ranges: Iterable[Range],
    launches: Iterable[Launch],
    runs: Sequence[Run],
    devices: Mapping[Hashable, str],
    ranks: Mapping[Hashable, int],
    source: str,
) -> list[Recording]:
    """Return a recording for each device of each process.

    Args:
        ranges: the ranges for which `is_ours` is true.
        launches: at least those that launched ``runs``.
        devices: the names of the devices, by (process, number) or by number.
        ranks: by process, its rank in the default group, where the trace says so.
        source: where the trace was read from.
    """
    host = _Host(ranges, launches)
    starts = [run.start for run in runs] + [each.start for each in host.ranges]
    start = min(starts, default=0.0)
    parts: defaultdict[tuple[Hashable, int], _Part] = defaultdict(lambda: _Part(start))
    for run in runs:
        parts[run.process, run.device].add(run.name, run.stream, run.start, run.end, *host.launched(run))
    for call in host.calls_on_cpu():
        parts[call.process, _CPU].call(call)
    for each, step, call in host.steps_on_cpu():
        parts[each.process, _CPU].add(each.name, step.stream, each.start, each.end, call, step)

    found = []
    for (process, device), part in sorted(parts.items(), key=lambda item: str(item[0])):
        name = devices.get((process, device)) or devices.get(device) or f"GPU {device}"
        found.append(part.recording("CPU" if device == _CPU else name, ranks.get(process), source))
    return found


_CPU = -1


class _Host:
    """What the threads of all processes have done."""

    def __init__(self, ranges: Iterable[Range], launches: Iterable[Launch]) -> None:
        self.ranges = list(ranges)
        on_thread: defaultdict[tuple[Hashable, Hashable], list[Range]] = defaultdict(list)
        for each in self.ranges:
            on_thread[each.process, each.thread].append(each)
        self._calls = {key: _InOrder(each for each in found if each.is_call) for key, found in on_thread.items()}
        self._steps = {key: _InOrder(each for each in found if not each.is_call) for key, found in on_thread.items()}
        self._launches: dict[tuple[Hashable, int], Launch] = {}
        for launch in launches:
            self._launches.setdefault((launch.process, launch.number), launch)

    def launched(self, run: Run) -> tuple[Range | None, Step | None]:
        """Return the call and the step in which an activity was launched."""
        launch = self._launches.get((run.process, run.number))
        thread = None if launch is None else (launch.process, launch.thread)
        if launch is None or thread not in self._calls:
            return None, None
        step = self._steps[thread].at(launch.time)
        return self._calls[thread].at(launch.time), None if step is None else step_of(step.name)

    def calls_on_cpu(self) -> Iterator[Range]:
        """Yield the calls whose tensors are on a CPU."""
        yield from (call for calls in self._calls.values() for call in calls.ranges if _on_cpu(call))

    def steps_on_cpu(self) -> Iterator[tuple[Range, Step, Range]]:
        """Yield the ranges of steps in such calls, with the step and the call."""
        for thread, steps in self._steps.items():
            for each in steps.ranges:
                call, step = self._calls[thread].at(each.start) or self._only_call(each), step_of(each.name)
                if call is not None and step is not None and _on_cpu(call):
                    yield each, step, call

    def _only_call(self, step: Range) -> Range | None:
        """Return the call for which another thread runs a step of one of its streams, if it can be only one."""
        found = [calls.at(step.start) for (process, _), calls in self._calls.items() if process == step.process]
        running = [call for call in found if call is not None]
        return running[0] if len(running) == 1 else None


class _InOrder:
    """Ranges of one thread that are not within one another."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.ranges = sorted(ranges, key=lambda each: each.start)
        self._starts = [each.start for each in self.ranges]

    def at(self, time: float) -> Range | None:
        """Return the range that the thread is in at a time."""
        index = bisect_right(self._starts, time) - 1
        return self.ranges[index] if index >= 0 and time <= self.ranges[index].end else None


def _on_cpu(call: Range) -> bool:
    what = called(call.name)
    return what is not None and what[0].device == "cpu"


class _Part:
    """What one device of one process has done."""

    def __init__(self, start: float) -> None:
        self._zero = start
        self._found: list[tuple[Activity, Range | None]] = []
        self._calls: dict[Range, Problem | None] = {}

    def call(self, call: Range) -> Problem | None:
        """Add a call, if it is new. Return its problem."""
        if call not in self._calls:
            what = called(call.name)
            self._calls[call] = None if what is None else what[0]
        return self._calls[call]

    def add(self, name: str, stream: str, start: float, end: float, call: Range | None, step: Step | None) -> None:
        """Add an activity."""
        problem = None if call is None else self.call(call)
        role = role_of(name, step, problem)
        self._found.append((Activity(name, role, stream, start - self._zero, end - self._zero, step), call))

    def recording(self, device: str, rank: int | None, source: str) -> Recording:
        """Return the recording. If the trace does not say which rank it is, the calls of the largest group do."""
        calls = sorted(self._calls, key=lambda each: each.start)
        index = {call: place for place, call in enumerate(calls)}
        activities = [each if call is None else replace(each, call=index[call]) for each, call in self._found]
        told = [what for what in map(called, (call.name for call in calls)) if what is not None]
        if rank is None and told:
            rank = max(told, key=lambda what: what[0].world)[2]
        recorded = tuple(RecordedCall(each.name, each.start - self._zero, each.end - self._zero) for each in calls)
        return Recording(device, rank, in_order(activities), recorded, source)
