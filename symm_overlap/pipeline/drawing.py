"""What the cost simulator found, as a timeline of plans: for the image and the trace that those have.

A box is an action, named by its stage and microbatch; an arrow leads from each send to its receive. Times are drawn as
milliseconds.
"""

from __future__ import annotations

from typing import Any

from ..plan import At, Event, Step, Timeline, draw
from . import kinds as kinds  # registers them
from .action import REDUCE_GRAD, UNSHARD, Action
from .cost_result import CostResult
from .encoded import Encoded

_STREAMS = {"SEND_F": "send", "SEND_B": "send", "RECV_F": "receive", "RECV_B": "receive"}
_STREAMS |= {UNSHARD: "gather", REDUCE_GRAD: "reduce"}
_MICROSECONDS = 1000.0


def timeline(result: CostResult, title: str = "") -> Timeline:
    """The timeline of every action.

    Args:
        result: what `simulate_cost` found.
        title: the first line of the image.
    """
    encoded, times = result.encoded, result.times
    decode = encoded.decoder()
    events: list[Event] = []
    moved = [0.0] * encoded.ranks
    for rank in range(encoded.ranks):
        free: dict[str, float] = {}  # when each stream has done what came before
        for index, cell in enumerate(range(encoded.starts[rank], encoded.starts[rank + 1])):
            action = decode(encoded.cells[cell])
            assert action is not None, "nothing is simulated of an empty cell"
            step = _step(encoded, action)
            start, end = times.starts[cell], times.ends[cell]
            events.append(Event(At(0, rank, index, step), start, end, start - free.get(step.stream, 0.0)))
            free[step.stream] = end
            if step.stream in ("send", "gather", "reduce"):
                moved[rank] += end - start
    events.sort(key=lambda event: (event.start, event.at.rank, event.at.index))
    return Timeline(tuple(events), max(result.busy, default=0.0), max(moved, default=0.0), title)


def trace(result: CostResult, title: str = "") -> dict[str, Any]:
    """A Chrome trace, to write as JSON: a process for each rank, with its memory over time beside its streams."""
    found = draw.trace(timeline(result, title))
    for rank in range(result.encoded.ranks):
        for use in result.memory(rank):
            in_use = {"activations": use.activations, "parameters": use.parameters}
            counter = {"ph": "C", "name": "memory", "pid": rank, "ts": use.time * _MICROSECONDS, "args": in_use}
            found["traceEvents"].append(counter)
    return found


def _step(encoded: Encoded, action: Action) -> Step:
    """An action as a step of a plan."""
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
    channel = 2 * (action.microbatch * len(encoded.placement) + first) + forward
    return Step(action.kind, stream, peer=encoded.placement[other], channel=channel, chunk=chunk)
