"""Read a trace of torch's profiler: the JSON that `torch.profiler.profile.export_chrome_trace` writes, also gzipped.

Other tools write this format too, so any part of an event may be missing or odd. Such events are left out.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .attribution import Launch, Range, Run, is_ours, recordings
from .recording import Recording

_MILLI = 1e-3  # the trace counts microseconds
_RUNS = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver", "runtime", "driver")
_RANGES = ("user_annotation", "cpu_op")
_NEVER = 1e20  # no clock shows this
_PROCESS = "the process"  # a trace is of one; the events of a GPU have the GPU's number in place of a process


def read_torch_trace(path: Path) -> list[Recording]:
    """Return the recordings of a trace, one for each device.

    Raises:
        ValueError: the file is not such a trace.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
        trace = json.loads(text, strict=False)  # names of kernels may have any characters
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, RecursionError) as error:  # nested too deeply
        raise ValueError(
            f"{path} is neither JSON nor gzipped JSON, nor an SQLite database ({error}): give a trace that torch's "
            "profiler has exported, or a report of Nsight Systems after nsys export --type sqlite"
        ) from None
    if isinstance(trace, list):  # the format allows a bare list of events
        trace = {"traceEvents": trace}
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} has no traceEvents: give a trace that torch's profiler has exported")
    return from_torch_trace(trace, str(path))


def from_torch_trace(trace: dict[str, Any], source: str) -> list[Recording]:
    """Return the recordings of a trace that has been parsed. ``source`` says where it comes from."""
    events = [event for event in map(_event, trace["traceEvents"]) if event is not None]
    properties = [(_number(each.get("id")), each) for each in _dicts(trace.get("deviceProperties"))]
    devices: dict[Hashable, str] = {
        int(number): str(each.get("name", "")) for number, each in properties if number is not None
    }
    info = next(_dicts([trace.get("distributedInfo")]), {})
    rank = _number(info.get("rank"))
    ranks: dict[Hashable, int] = {} if rank is None else {_PROCESS: int(rank)}
    return recordings(_ranges(events), _launches(events), _runs(events), devices, ranks, source)


class _Event(NamedTuple):
    """An event with a beginning and an end, in milliseconds."""

    category: str
    name: str
    thread: Hashable
    start: float
    end: float
    arguments: dict[str, Any]

    @property
    def number(self) -> int | None:
        """The number that the activity of a GPU has in common with its launch."""
        number = _number(self.arguments.get("correlation"))
        return None if number is None else int(number)


def _event(event: Any) -> _Event | None:
    if not isinstance(event, dict) or event.get("ph") != "X":
        return None
    category, name, start = event.get("cat"), event.get("name"), _number(event.get("ts"))
    if not isinstance(category, str) or not isinstance(name, str) or start is None:
        return None
    end, thread = start + max(0.0, _number(event.get("dur")) or 0.0), event.get("tid")
    if max(-start, end) > _NEVER:
        return None
    thread = thread if isinstance(thread, (int, str)) else None
    arguments = next(_dicts([event.get("args")]), {})
    return _Event(category.lower(), name, thread, start * _MILLI, end * _MILLI, arguments)


def _number(value: Any) -> float | None:
    """Return a number, which may be written as a text; None for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _dicts(values: Any) -> Iterator[dict[str, Any]]:
    yield from (each for each in (values if isinstance(values, list) else ()) if isinstance(each, dict))


def _ranges(events: Sequence[_Event]) -> Iterator[Range]:
    for event in events:
        if event.category in _RANGES and is_ours(event.name):
            yield Range(_PROCESS, event.thread, event.start, event.end, event.name)


def _launches(events: Sequence[_Event]) -> Iterator[Launch]:
    for event in events:
        if event.category in _LAUNCHES and event.number is not None:
            yield Launch(_PROCESS, event.thread, event.start, event.number)


def _runs(events: Sequence[_Event]) -> list[Run]:
    runs = []
    for event in events:
        if event.category in _RUNS:
            device, stream = _number(event.arguments.get("device")), event.arguments.get("stream", "?")
            number = -1 if event.number is None else event.number
            place = _PROCESS, int(device or 0), f"stream {stream}"
            runs.append(Run(*place, event.start, event.end, event.name, number))
    return runs
