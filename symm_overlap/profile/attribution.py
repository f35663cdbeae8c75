"""Find out which call and which step launched each activity, and create the recordings of a trace.

A profiler gives an activity of a GPU and the call of the driver that launched it the same number. That call happened
on a thread of the host, within the ranges of a step and of a call. On a CPU, the ranges of steps are the activities.
A call may be within a step of another call, such as an op within a step of a pipeline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..collective import called
from ..plan import Step
from ..plan.kinds import find
from ..plan.ranges import CALL, STEP, call_of, step_of
from .intervals import union, without
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
        return self.name.startswith(CALL)


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
    return name.startswith((CALL, STEP))


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
        ranks: by process, its rank in the default group, where the trace says so. Processes are numbers if the trace
            has several.
        source: where the trace was read from.
    """
    host = _Host(ranges, launches)
    start = min((each.start for found in (runs, host.ranges) for each in found), default=0.0)
    parts: defaultdict[tuple[Hashable, int | str], _Part] = defaultdict(lambda: _Part(start))
    for run in runs:
        parts[run.process, run.device].add(run.name, run.stream, run.start, run.end, host.launched(run))
    for call in host.calls_on_cpu():
        parts[call.process, _CPU].call(call)
    for each, within in host.steps_on_cpu():
        stream = "" if within.step is None else within.step.stream
        parts[each.process, _CPU].add(each.name, stream, each.start, each.end, within)

    found = []
    for (process, device), part in sorted(parts.items(), key=lambda item: str(item[0])):
        name = devices.get((process, device)) or devices.get(device) or f"GPU {device}"
        number = process if isinstance(process, int) else None
        found.append(part.recording("CPU" if device == _CPU else name, ranks.get(process), number, source))
    return found


_CPU = "CPU"  # no number: a trace may give any number to a GPU


class Within(NamedTuple):
    """The calls around an activity, the innermost first, and the step of the innermost call that it belongs to."""

    calls: tuple[Range, ...] = ()
    step: Step | None = None

    @property
    def runs_the_model(self) -> bool:
        """Whether the step is one of a pipeline that runs any code of the model, which may use threads of its own."""
        record = None if self.step is None else find(self.step.kind)
        return record is not None and record.role == "compute" and called(self.calls[0].name) is None


class _Host:
    """What the threads of all processes have done."""

    def __init__(self, ranges: Iterable[Range], launches: Iterable[Launch]) -> None:
        self.ranges = list(ranges)
        on_thread: defaultdict[tuple[Hashable, Hashable], list[Range]] = defaultdict(list)
        for each in self.ranges:
            on_thread[each.process, each.thread].append(each)
        self._threads = {key: _Thread(found) for key, found in on_thread.items()}
        self._launches: dict[tuple[Hashable, int], Launch] = {}
        for launch in launches:
            self._launches.setdefault((launch.process, launch.number), launch)

    def launched(self, run: Run) -> Within:
        """Return the calls and the step in which an activity was launched.

        The backward pass of a pipeline's step runs on a thread of autograd, while the thread of the step waits.
        """
        launch = self._launches.get((run.process, run.number))
        if launch is None:
            return Within()
        thread = self._threads.get((launch.process, launch.thread))
        here = Within() if thread is None else thread.at(launch.time)
        others = self._others(launch.process, launch.thread, launch.time)
        around = [each for each in others if each.runs_the_model]
        if len(around) != 1:
            return here
        return Within(here.calls + around[0].calls, here.step if here.calls else around[0].step)

    def calls_on_cpu(self) -> Iterator[Range]:
        """Yield the calls whose tensors are on a CPU."""
        yield from (each for each in self.ranges if each.is_call and _on_cpu(each))

    def steps_on_cpu(self) -> Iterator[tuple[Range, Within]]:
        """Yield the ranges of steps in such calls. Where other ranges are within a step, it is cut into pieces."""
        processes = {call.process for call in self.calls_on_cpu()}
        for (process, name), thread in self._threads.items():
            for each, within in thread.pieces() if process in processes else ():
                calls = within.calls
                if not calls:  # a thread that runs the steps of one stream
                    found = self._others(process, name, each.start)
                    calls = found[0].calls if len(found) == 1 else ()
                if calls and _on_cpu(calls[0]):
                    yield each, within._replace(calls=calls)

    def _others(self, process: Hashable, name: Hashable, time: float) -> list[Within]:
        """Return the calls that the other threads of a process are in at a time."""
        others = [thread for key, thread in self._threads.items() if key[0] == process and key[1] != name]
        return [found for found in (thread.at(time) for thread in others) if found.calls]


class _Thread:
    """The ranges of one thread. Of two ranges, one is within the other, or they have no moment in common."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = sorted(ranges, key=lambda each: (each.start, -each.end))
        self._starts = [each.start for each in self._ranges]
        self._outer: list[int] = []  # for each range, the index of the range around it; -1 if there is none
        for index, each in enumerate(self._ranges):
            outer = index - 1
            while outer >= 0 and self._ranges[outer].end <= each.start:
                outer = self._outer[outer]
            self._outer.append(outer)

    def at(self, time: float) -> Within:
        """Return the calls and the step that the thread is in at a time."""
        index = bisect_right(self._starts, time) - 1
        while index >= 0 and self._ranges[index].end < time:
            index = self._outer[index]
        return self._within(index)

    def pieces(self) -> Iterator[tuple[Range, Within]]:
        """Yield the parts of each step in which the thread is in no other range inside it."""
        inside: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for index, each in enumerate(self._ranges):
            inside[self._outer[index]].append((each.start, each.end))
        for index, each in enumerate(self._ranges):
            if not each.is_call:
                within = self._within(index)
                for start, end in without([(each.start, each.end)], union(inside[index])):
                    yield each._replace(start=start, end=end), within

    def _within(self, index: int) -> Within:
        step, calls = None, []
        while index >= 0:
            each = self._ranges[index]
            if each.is_call:
                calls.append(each)
            elif step is None and not calls:
                step = step_of(each.name)
            index = self._outer[index]
        return Within(tuple(calls), step)


def _on_cpu(call: Range) -> bool:
    found = call_of(call.name)
    return found is not None and found[1].get("device") == "cpu"


class _Part:
    """What one device of one process has done."""

    def __init__(self, start: float) -> None:
        self._zero = start
        self._found: list[tuple[Activity, tuple[Range, ...]]] = []
        self._calls: set[Range] = set()

    def call(self, call: Range) -> None:
        """Add a call, if it is new."""
        self._calls.add(call)

    def add(self, name: str, stream: str, start: float, end: float, within: Within) -> None:
        """Add an activity."""
        self._calls.update(within.calls)
        what = called(within.calls[0].name) if within.calls else None
        role = role_of(name, within.step, None if what is None else what[0])
        activity = Activity(name, role, stream, start - self._zero, end - self._zero, within.step)
        self._found.append((activity, within.calls))

    def recording(self, device: str, rank: int | None, process: int | None, source: str) -> Recording:
        """Return the recording."""
        calls = sorted(self._calls, key=lambda each: (each.start, -each.end))
        index = {call: place for place, call in enumerate(calls)}
        activities = [replace(each, calls=tuple(index[call] for call in around)) for each, around in self._found]
        recorded = tuple(RecordedCall(each.name, each.start - self._zero, each.end - self._zero) for each in calls)
        return Recording(device, rank, in_order(activities), recorded, source, process)
