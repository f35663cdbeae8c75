"""Costs and timelines: what a simulation takes, and what it gives."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from .order import At
from .step import COPIES, Step


@dataclass(frozen=True, slots=True)
class Costs:
    """How long steps take, in milliseconds; a function ``(rank, step) -> (body, tail)`` may stand in its place.

    Attributes:
        produce, consume: the body of a chunk's matmul, for each chunk that a step computes with. reduce: the sum of a
            chunk. copy: a chunk's copy of any kind, with its links to itself.
        tail: the last wave of a produce or consume. latency: a signal, or leaving a wait or barrier. sleep: the sleep.
    """

    produce: float = 1.0
    consume: float = 1.0
    reduce: float = 0.1
    copy: float = 0.5
    tail: float = 0.1
    latency: float = 0.005
    sleep: float = 0.001

    def __call__(self, rank: int, step: Step) -> tuple[float, float]:
        """The body and the tail of a step."""
        if step.kind in ("produce", "consume"):
            # A step without a chunk computes with all that it reads.
            read = sum(region.stop - region.start for region in step.reads) if step.chunk is None else 1
            return max(1, read) * getattr(self, step.kind), self.tail
        if step.kind in COPIES:
            return self.copy, 0.0
        if step.kind in ("fork", "join"):
            return 0.0, 0.0
        return {"reduce": self.reduce, "sleep": self.sleep}.get(step.kind, self.latency), 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """One step on the clock: it ran from ``start`` to ``end``, after its stream had waited ``waited`` to get there.

    A wait and a barrier start when their stream reaches them; what they spend until the last peer comes counts as
    waited.
    """

    at: At
    start: float
    end: float
    waited: float


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found. Times are those of the costs: milliseconds, unless these are in something else.

    Attributes:
        events: every step, in order of start.
        compute: the matmuls of the busiest rank in one piece, without communication.
        communication: the copies of the busiest rank, one after the other.
    """

    events: tuple[Event, ...]
    compute: float
    communication: float

    @cached_property
    def makespan(self) -> float:
        """From the start of the first step to the end of the last, over all ranks."""
        return max((event.end for event in self.events), default=0.0)

    @cached_property
    def signals(self) -> list[tuple[Event, Event]]:
        """Every signal with the wait it ends."""
        slots: defaultdict[tuple[str, int, int | None, int | None], list[Event]] = defaultdict(list)
        for event in sorted(self.events, key=lambda event: (event.at.call, event.at.rank, event.at.index)):
            step = event.at.step
            if step.kind in ("signal", "wait"):
                slots[step.kind, event.at.rank, step.peer, step.channel].append(event)
        pairs: list[tuple[Event, Event]] = []
        for (kind, rank, peer, channel), events in slots.items():
            if kind == "signal" and peer is not None:
                pairs += zip(events, slots["wait", peer, rank, channel], strict=False)
        return pairs

    @property
    def exposed(self) -> float:
        """Communication that is not hidden: the makespan less the compute alone."""
        return self.makespan - self.compute

    @property
    def efficiency(self) -> float:
        """Overlap efficiency: 1 if the smaller of compute and communication is hidden, 0 if none of it is."""
        smaller = min(self.compute, self.communication)
        return (self.compute + self.communication - self.makespan) / smaller if smaller else 1.0

    @cached_property
    def busy(self) -> dict[tuple[int, str], float]:
        """For each (rank, stream), how long it was at work rather than waiting."""
        busy: defaultdict[tuple[int, str], float] = defaultdict(float)
        for event in self.events:
            meets = event.at.step.kind in ("wait", "barrier")
            busy[event.at.rank, event.at.step.stream] += event.end - event.start - (event.waited if meets else 0.0)
        return dict(busy)

    def __str__(self) -> str:
        lines = [
            f"makespan {self.makespan:.3f} ms; matmul alone {self.compute:.3f}, copies alone {self.communication:.3f}",
            f"exposed communication {self.exposed:.3f} ms, overlap efficiency {self.efficiency:.2f}",
        ]
        streams: defaultdict[str, list[float]] = defaultdict(list)
        for (_, stream), busy in self.busy.items():
            streams[stream].append(busy)
        lines += [f"{name} busy {min(each):.3f} to {max(each):.3f} ms on a rank" for name, each in streams.items()]
        return "\n".join(lines)
