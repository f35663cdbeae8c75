"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from typing import Any

from ..timeline import Timeline

_MICROSECONDS = 1000.0  # in a millisecond, the unit of simulated times


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as a Chrome trace, to be written as JSON.

    It has a process for each rank, a thread for each stream, and an arrow for each signal.
    """
    streams = sorted({(event.at.rank, event.at.step.stream) for event in timeline.events})
    threads = {stream: number for number, stream in enumerate(streams)}
    events: list[dict[str, Any]] = []
    for (rank, stream), thread in threads.items():
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}})
    for event in timeline.events:
        step = event.at.step
        events.append(
            {
                "ph": "X",
                "name": str(step).removesuffix(f" on {step.stream}"),
                "cat": step.kind,
                "pid": event.at.rank,
                "tid": threads[event.at.rank, step.stream],
                "ts": event.start * _MICROSECONDS,
                "dur": (event.end - event.start) * _MICROSECONDS,
                "args": {
                    "call": event.at.call,
                    "step": event.at.index,
                    "waited_ms": event.waited,
                    "reads": [str(region) for region in step.reads],
                    "writes": [str(region) for region in step.writes],
                },
            }
        )
    for number, (signal, wait) in enumerate(timeline.signals):
        for phase, event, time in (("s", signal, signal.start), ("f", wait, wait.end)):
            arrow = {"ph": phase, "id": number, "name": signal.at.step.label or "signal", "cat": "signal"}
            place = {"pid": event.at.rank, "tid": threads[event.at.rank, event.at.step.stream]}
            events.append({**arrow, **place, "ts": time * _MICROSECONDS, **({"bp": "e"} if phase == "f" else {})})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
