"""Costs and timelines: the input and the result of a simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .kinds import kind
from .order import At
from .step import Step


@dataclass(frozen=True)
class Costs:
    """How long steps take, in milliseconds.

    `simulate` also accepts any other function ``(rank, step) -> (body, tail)``.

    Most attributes are the duration of one kind of step. If a step that computes or copies names no chunk, the duration
    counts once for each unit that it writes.

    Attributes:
        kinds: durations by name of the kind. For kinds that are not in it, the role of the kind decides.
        compute: a step that computes.
        overhead: a step whose arithmetic is needed only because ranks share the work.
        copy: a step that copies and shares its links with no other copy.
        meet: posting, or returning from a wait or barrier.
        order: a step that only orders others.
        sleep: the pause that lets other streams start first.
        tail: the last wave of a step that computes, added to its duration. Steps of overhead have none.
    """

    kinds: Mapping[str, float] = field(default_factory=dict)
    compute: float = 1.0
    overhead: float = 0.1
    copy: float = 0.5
    meet: float = 0.005
    order: float = 0.0
    sleep: float = 0.001
    tail: float = 0.1

    def __call__(self, rank: int, step: Step) -> tuple[float, float]:
        """The body and the tail of a step."""
        record = kind(step.kind)
        role = "overhead" if record.overhead else "sleep" if step.kind == "sleep" else record.role
        units = 1
        if step.chunk is None and record.role in ("compute", "copy"):
            units = max(1, sum(region.stop - region.start for region in step.writes))
        body = units * self.kinds.get(step.kind, getattr(self, role))
        return body, self.tail if role == "compute" else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """One step on the clock: it ran from ``start`` to ``end``, after its stream had waited for the time ``waited``.

    A wait or barrier starts when its stream reaches it, and its time until the last peer comes counts as waited. A
    collective, which holds an engine, starts once all ranks have come.
    """

    at: At
    start: float
    end: float
    waited: float


def waits_at_once(step: Step) -> bool:
    """True if a step starts when its stream reaches it, because it only waits for others and moves no data itself."""
    record = kind(step.kind)
    return record.meets in ("awaits", "everyone") and not record.occupies


@dataclass(frozen=True)
class Timeline:
    """The result of `simulate`. Times are in the unit of the costs, which is milliseconds by default.

    Attributes:
        events: every step, in order of start.
        compute: the time of the busiest rank's compute steps in one piece, without communication.
        communication: the time of the busiest rank's copies, one after the other.
        title: the ops that were simulated, the number of ranks and the number of chunks.
    """

    events: tuple[Event, ...]
    compute: float
    communication: float
    title: str = ""

    @cached_property
    def makespan(self) -> float:
        """The time from the start of the first step to the end of the last, over all ranks."""
        return max((event.end for event in self.events), default=0.0)

    @cached_property
    def signals(self) -> list[tuple[Event, Event]]:
        """The pairs of a step that posts, such as a signal, and the step that awaits this post."""
        slots: defaultdict[tuple[str, int, int, int | None], list[Event]] = defaultdict(list)
        for event in sorted(self.events, key=lambda event: (event.at.call, event.at.rank, event.at.index)):
            step = event.at.step
            meets = kind(step.kind).meets
            if meets in ("posts", "awaits"):
                for peer in step.peers:
                    slots[meets, event.at.rank, peer, step.channel].append(event)
        pairs: list[tuple[Event, Event]] = []
        for (meets, rank, peer, channel), events in list(slots.items()):
            if meets == "posts":
                pairs += zip(events, slots["awaits", peer, rank, channel], strict=False)
        return pairs

    @property
    def exposed(self) -> float:
        """The communication that is not hidden: the makespan minus the compute time alone."""
        return self.makespan - self.compute

    @property
    def efficiency(self) -> float | None:
        """Overlap efficiency: 1 if the smaller of compute and communication is hidden, 0 if none of it is.

        None if nothing is computed or nothing is copied, because then there is nothing to overlap. Also None if peers'
        memory is used in place, because the compute steps then include the time of the communication.
        """
        smaller = min(self.compute, self.communication)
        if not smaller or self.in_place:
            return None
        return (self.compute + self.communication - self.makespan) / smaller

    @cached_property
    def in_place(self) -> bool:
        """True if some step computes directly with the memory of a peer, without a copy."""
        return any(
            kind(event.at.step.kind).role == "compute" and region.rank != event.at.rank
            for event in self.events
            for region in event.at.step.reads + event.at.step.writes
        )

    @cached_property
    def busy(self) -> dict[tuple[int, str], float]:
        """For each (rank, stream), the time during which it ran steps and did not wait."""
        busy: defaultdict[tuple[int, str], float] = defaultdict(float)
        for event in self.events:
            waited = event.waited if waits_at_once(event.at.step) else 0.0
            busy[event.at.rank, event.at.step.stream] += event.end - event.start - waited
        return dict(busy)

    def __str__(self) -> str:
        lines = [
            f"makespan {self.makespan:.3f} ms; compute alone {self.compute:.3f}, copies alone {self.communication:.3f}",
            f"exposed communication {self.exposed:.3f} ms, {self._efficiency_text()}",
        ]
        streams: defaultdict[str, list[float]] = defaultdict(list)
        for (_, stream), busy in self.busy.items():
            streams[stream].append(busy)
        lines += [f"{name} busy {min(each):.3f} to {max(each):.3f} ms on a rank" for name, each in streams.items()]
        return "\n".join(lines)

    def _efficiency_text(self) -> str:
        if self.efficiency is not None:
            return f"overlap efficiency {self.efficiency:.2f}"
        if self.in_place:
            return "no overlap efficiency: compute steps use peers' memory in place, without copies to overlap with"
        missing = "copied" if self.communication == 0 else "computed"
        return f"no overlap efficiency: nothing is {missing}, so there is nothing to overlap"
