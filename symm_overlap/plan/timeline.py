"""Costs and timelines: what a simulation takes, and what it gives."""

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
    """How long steps take, in milliseconds; a function ``(rank, step) -> (body, tail)`` may stand in its place.

    A step that computes or copies and names no chunk takes so long for each unit that it writes.

    Attributes:
        kinds: for some kinds, how long a step takes. For the others its role decides.
        compute: a step that computes. overhead: one whose arithmetic is there only because ranks share the work.
        copy: a step that copies, with its links to itself. meet: posting, or returning from a wait or barrier.
        order: a step that only orders others. sleep: the pause that lets other streams start first.
        tail: the last wave of a step that computes, added to the above; steps of overhead have none.
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
    """One step on the clock: it ran from ``start`` to ``end``, after its stream had waited ``waited`` to get there.

    A wait and a barrier start when their stream reaches them; what they spend until the last peer comes counts as
    waited. A collective, which holds an engine once all ranks have come, starts then.
    """

    at: At
    start: float
    end: float
    waited: float


def waits_at_once(step: Step) -> bool:
    """Whether a step is at work from the moment its stream reaches it: it waits for others and moves no data itself."""
    record = kind(step.kind)
    return record.meets in ("awaits", "everyone") and not record.occupies


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found. Times are those of the costs: milliseconds, unless these are in something else.

    Attributes:
        events: every step, in order of start.
        compute: the compute steps of the busiest rank in one piece, without communication.
        communication: the copies of the busiest rank, one after the other.
        title: which ops were simulated, on how many ranks, in how many chunks.
    """

    events: tuple[Event, ...]
    compute: float
    communication: float
    title: str = ""

    @cached_property
    def makespan(self) -> float:
        """From the start of the first step to the end of the last, over all ranks."""
        return max((event.end for event in self.events), default=0.0)

    @cached_property
    def signals(self) -> list[tuple[Event, Event]]:
        """Every step that posts, such as a signal, with each one that awaits it."""
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
        """Communication that is not hidden: the makespan less the compute alone."""
        return self.makespan - self.compute

    @property
    def efficiency(self) -> float | None:
        """Overlap efficiency: 1 if the smaller of compute and communication is hidden, 0 if none of it is.

        None if nothing is computed or nothing is copied, since there is then nothing to overlap; and None if peers'
        memory is used in place, since the time of the communication is then a part of that of the compute steps.
        """
        smaller = min(self.compute, self.communication)
        if not smaller or self.in_place:
            return None
        return (self.compute + self.communication - self.makespan) / smaller

    @cached_property
    def in_place(self) -> bool:
        """Whether a step computes with a peer's memory where it lies, without a copy."""
        return any(
            kind(event.at.step.kind).role == "compute" and region.rank != event.at.rank
            for event in self.events
            for region in event.at.step.reads + event.at.step.writes
        )

    @cached_property
    def busy(self) -> dict[tuple[int, str], float]:
        """For each (rank, stream), how long it was at work rather than waiting."""
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
