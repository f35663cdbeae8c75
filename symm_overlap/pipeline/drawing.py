"""Turn a result of the cost simulator, or a real step, into a timeline of plans, which can be drawn or traced.

A box is an action, named by its stage and microbatch. An arrow leads from each send to its receive. Times are drawn as
milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..plan import At, Event, Step, Timeline, draw
from . import kinds as kinds  # registers them
from .action import REDUCE_GRAD, UNSHARD, Action
from .measured import TimedAction
from .simulation.cost_result import CostResult

_STREAMS = {"SEND_F": "send", "SEND_B": "send", "RECV_F": "receive", "RECV_B": "receive"}
_STREAMS |= {UNSHARD: "gather", REDUCE_GRAD: "reduce"}
_MICROSECONDS = 1000.0


def timeline(result: CostResult, title: str = "") -> Timeline:
    """Return the timeline of all actions of a simulated step.

    Args:
        result: the result of `simulate_cost`.
        title: the first line of the image.
    """
    encoded, times = result.encoded, result.times
    decode = encoded.decoder()
    rows: list[list[TimedAction]] = []
    for rank in range(encoded.ranks):
        rows.append([])
        for cell in range(encoded.starts[rank], encoded.starts[rank + 1]):
            action = decode(encoded.cells[cell])
            assert action is not None, "nothing is simulated of an empty cell"
            rows[-1].append(TimedAction(action, times.starts[cell], times.ends[cell]))
    return timeline_of(encoded.placement, rows, title)


def timeline_of(placement: Sequence[int], rows: Iterable[Iterable[TimedAction]], title: str = "") -> Timeline:
    """Return the timeline of actions whose times are known, in milliseconds.

    Args:
        placement: for each stage, its rank.
        rows: for each rank, the actions that it ran, in order.
        title: the first line of the image.
    """
    events: list[Event] = []
    busy, moved = [0.0], [0.0]
    for rank, row in enumerate(rows):
        free: dict[str, float] = {}  # for each stream, the end of its previous action
        taken = {"compute": 0.0, "move": 0.0}
        for index, ran in enumerate(row):
            step = _step(placement, ran.action)
            events.append(Event(At(0, rank, index, step), ran.start, ran.end, ran.start - free.get(step.stream, 0.0)))
            free[step.stream] = ran.end
            if step.stream != "receive":
                taken["compute" if step.stream == "compute" else "move"] += ran.end - ran.start
        busy.append(taken["compute"])
        moved.append(taken["move"])
    events.sort(key=lambda event: (event.start, event.at.rank, event.at.index))
    return Timeline(tuple(events), max(busy), max(moved), title)


def side_by_side(traces: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Merge several Chrome traces into one. The processes of one rank are shown one below the other.

    Args:
        traces: the traces by their names. The name of a trace is added to the names of its ranks.
    """
    merged: list[dict[str, Any]] = []
    for place, (name, found) in enumerate(traces.items()):
        for event in found["traceEvents"]:
            pid = event["pid"] * len(traces) + place
            changed = {**event, "pid": pid}
            if "id" in event:  # of an arrow
                changed["id"] = event["id"] * len(traces) + place
            if event["name"] == "process_name":
                changed["args"] = {"name": f"{event['args']['name']}, {name}"}
                merged.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
            merged.append(changed)
    return {"traceEvents": merged, "displayTimeUnit": "ms"}


def trace(result: CostResult, title: str = "") -> dict[str, Any]:
    """Return a Chrome trace, to be written as JSON. Each rank is a process, with its streams and its memory over time.

    Args:
        result: the result of `simulate_cost`.
        title: the title of the timeline.
    """
    found = draw.trace(timeline(result, title))
    for rank in range(result.encoded.ranks):
        for use in result.memory(rank):
            in_use = {"activations": use.activations, "parameters": use.parameters}
            counter = {"ph": "C", "name": "memory", "pid": rank, "ts": use.time * _MICROSECONDS, "args": in_use}
            found["traceEvents"].append(counter)
    return found


def _step(placement: Sequence[int], action: Action) -> Step:
    """Return an action as a step of a plan."""
    stream = _STREAMS.get(action.kind, "compute")
    chunk = None if action.microbatch is None else (action.stage, action.microbatch)
    if stream not in ("send", "receive"):
        label = str(action) if action.parts else f"stage {action.stage}" if chunk is None else ""
        return Step(action.kind, stream, chunk=chunk, label=label)
    forward = action.kind.endswith("F")
    sends = stream == "send"
    other = action.stage + (1 if forward == sends else -1)
    first = min(action.stage, other)
    assert action.microbatch is not None
    channel = 2 * (action.microbatch * len(placement) + first) + forward
    return Step(action.kind, stream, peers=(placement[other],), channel=channel, chunk=chunk)
