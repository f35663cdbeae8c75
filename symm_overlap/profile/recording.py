"""What a profiler has recorded on one rank: activities of its device, and the calls of our ops that they belong to.

Readers (`torch_trace`, `nsight`) create recordings; `exposure` computes what was hidden. Times are in milliseconds from
the start of the recording.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..collective import called
from ..collective.choosing.choice import Choice
from ..collective.problem import Problem
from ..plan import Step
from ..plan.ranges import call_of
from .intervals import Intervals, union

ROLES = ("compute", "sum", "copy", "collective", "meet", "other")
"""What an activity does: arithmetic of the model; arithmetic that is needed only because ranks share the work, such as
a sum of partial results; moving data to where a peer, or this rank, needs it; a collective of the vendor's library;
signalling and waiting; or something that is none of our business, such as a copy from the host."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One kernel, copy or fill of a device. On a CPU, one step of a plan.

    Attributes:
        name: the profiler's name for it.
        role: one of `ROLES`.
        stream: the stream that ran it; on a CPU, the stream of the plan.
        start, end: in milliseconds.
        step: the step of the plan that launched it, if it is known. Its memory is not known.
        calls: indices in `Recording.calls` of the calls that launched it, the innermost first.
    """

    name: str
    role: str
    stream: str
    start: float
    end: float
    step: Step | None = None
    calls: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call: of an op, of a collective of FSDP, or one step of a pipeline.

    Attributes:
        name: the name of its range in the trace.
        start, end: when the host began to issue it, and when it had issued everything, in milliseconds. On a CPU, when
            the call began and returned.
    """

    name: str
    start: float
    end: float

    @property
    def what(self) -> tuple[Problem, Choice] | None:
        """The problem and the choice of a call of an op; see `symm_overlap.collective.called`."""
        return called(self.name)

    @property
    def text(self) -> str:
        """The call in words."""
        found = call_of(self.name)
        return self.name if found is None else found[0]

    def fact(self, key: str) -> int:
        """Return a number of the call, such as its "rank" or "world"; 0 if its range does not tell."""
        found = call_of(self.name)
        value = "" if found is None else found[1].get(key, "")
        return int(value) if value.isdecimal() else 0


@dataclass(frozen=True)
class Recording:
    """The recording of one rank.

    Attributes:
        device: the name of the device, such as "NVIDIA H200", or "CPU".
        rank: the rank in the default group, or None if the trace does not say.
        process: the number of the process, or None if the trace is of one process.
        activities: in order of their start.
        calls: in order of their start.
        source: where it was read from.
    """

    device: str
    rank: int | None
    activities: tuple[Activity, ...]
    calls: tuple[RecordedCall, ...]
    source: str = ""
    process: int | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the ops ran on a CPU."""
        return self.device == "CPU"

    @cached_property
    def compute(self) -> Intervals:
        """When arithmetic of the model ran on the device."""
        return union((each.start, each.end) for each in self.activities if each.role == "compute")

    @cached_property
    def activities_of_calls(self) -> list[list[Activity]]:
        """For each call, its activities, and those of the calls within it."""
        found: defaultdict[int, list[Activity]] = defaultdict(list)
        for activity in self.activities:
            for call in activity.calls:
                found[call].append(activity)
        return [found[index] for index in range(len(self.calls))]


def in_order(activities: Sequence[Activity]) -> tuple[Activity, ...]:
    """Return activities in order of their start."""
    return tuple(sorted(activities, key=lambda activity: (activity.start, activity.end)))
