"""Compare a recorded call with the cost model's prediction for it, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..collective.choosing.plans import planned
from ..collective.choosing.prediction import predict, predict_steps
from ..plan import At, Event, Step, Timeline, kind
from ..plan.kinds import find
from ..runtime import TRAITS, Device, costs_of, record_of
from .exposure import exposure_of_call
from .recording import Recording

_MOST_CHUNKS = 1 << 11  # of all ranks: the time to plan grows with their square, and is seconds for so many


@dataclass(frozen=True)
class ComparedStep:
    """When one step ran, in milliseconds from the start of the call, and when it was predicted to run."""

    name: str
    measured: tuple[float, float]
    predicted: tuple[float, float] | None


@dataclass(frozen=True)
class Comparison:
    """One call, as it was recorded and as the model predicts it.

    Attributes:
        model: the name of the model of the device.
        measured, predicted: the time of the whole call, in milliseconds.
        steps: its steps, in order of their start.
        timeline: the prediction as a timeline of one rank.
    """

    model: str
    measured: float
    predicted: float
    steps: tuple[ComparedStep, ...]
    timeline: Timeline

    def __str__(self) -> str:
        lines = [
            f"predicted {self.predicted:.3f} ms on {self.model}, measured {self.measured:.3f} ms "
            f"({self.measured / self.predicted:.2f} of it)",
            f"  {'step':34}{'measured, ms':>20}{'predicted, ms':>20}",
        ]
        for each in self.steps:
            predicted = "-" if each.predicted is None else _span(each.predicted)
            lines.append(f"  {each.name:34}{_span(each.measured):>20}{predicted:>20}")
        return "\n".join(lines)


def _span(times: tuple[float, float]) -> str:
    return f"{times[0]:.3f} to {times[1]:.3f}"


def compare(recording: Recording, index: int) -> Comparison | None:
    """Compare one call with its prediction.

    Return None if the model does not predict such a call: it was on a device without costs of its own, its parts did
    not travel by a plan in chunks, or there are too many of them. The prediction is for a call that needs nothing but
    its result, and for links of the device's datasheet.
    """
    what, activities = recording.calls[index].what, recording.activities_of_calls[index]
    if what is None:
        return None
    problem, choice = what
    rank = recording.calls[index].fact("rank")
    if rank >= problem.world or problem.world * choice.chunks > _MOST_CHUNKS:
        return None
    known = TRAITS[problem.device].costs
    if record_of(known, recording.device) is None or choice.whole or choice.exchange not in ("planned", "fused"):
        return None
    by_kernels = any(each.step is not None and each.step.kind == "wait" for each in activities)
    costs = costs_of(known, Device(recording.device, stream_waits=not by_kernels))
    plan = planned(problem, choice, rank)
    times = predict_steps(problem, costs, plan, choice.chunks)
    expected = {_key(step, plan.rank, plan.world): span for step, span in zip(plan.steps, times, strict=True)}
    measured = _spans(recording, index)
    steps = tuple(
        ComparedStep(_name(step), span, expected.get(_key(step, rank, problem.world)))
        for step, span in measured.items()
    )
    title = f"predicted: {problem.op}, {problem.world} ranks, {costs.name}"
    timeline = _timeline(plan.rank, zip(plan.steps, times, strict=True), title)
    total = predict(problem, costs, choice).total
    return Comparison(costs.name, exposure_of_call(recording, index).total, total, steps, timeline)


def measured_timeline(recording: Recording, index: int, title: str) -> Timeline | None:
    """Return one recorded call as a timeline of one rank; None if the steps of its activities are not known."""
    found = _spans(recording, index)
    return _timeline(recording.calls[index].fact("rank"), found.items(), title) if found else None


def _timeline(rank: int, steps: Iterable[tuple[Step, tuple[float, float]]], title: str) -> Timeline:
    events = [Event(At(0, rank, number, step), *span, 0.0) for number, (step, span) in enumerate(steps)]
    alone, copies = (
        sum(event.end - event.start for event in events if kind(event.at.step.kind).role == role)
        for role in ("compute", "copy")
    )
    return Timeline(tuple(sorted(events, key=lambda event: event.start)), alone, copies, title)


def _spans(recording: Recording, index: int) -> dict[Step, tuple[float, float]]:
    """Return for each known step of a call when its activities ran, after the start of the call, in order of their
    start. Calls within the call are left out.
    """
    activities = recording.activities_of_calls[index]
    start = min((each.start for each in activities), default=0.0)
    found: dict[Step, tuple[float, float]] = {}
    for each in activities:
        if each.calls[0] == index and each.step is not None and find(each.step.kind) is not None:
            begin, end = found.get(each.step, (each.start - start, 0.0))
            found[each.step] = min(begin, each.start - start), max(end, each.end - start)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _key(step: Step, rank: int, world: int) -> tuple[object, ...]:
    """Return the same key for corresponding steps of different ranks."""
    chunk = None if step.chunk is None else ((step.chunk[0] - rank) % world, step.chunk[1])
    # Only the names of signals and waits tell their peers.
    peers = tuple((peer - rank) % world for peer in step.peers) if kind(step.kind).role == "meet" else ()
    return step.kind, chunk, step.channel, peers


def _name(step: Step) -> str:
    words = step.kind if step.chunk is None else f"{step.kind} {step.chunk_name()}"
    return f"{words} on {step.stream}"
