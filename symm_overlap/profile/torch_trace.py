"""Read a trace of torch's profiler: the JSON that `torch.profiler.profile.export_chrome_trace` writes, also gzipped."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .attribution import Launch, Range, Run, is_ours, recordings
from .recording import Recording

_MILLI = 1e-3  # the trace counts microseconds
_RUNS = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver", "runtime", "driver")
_RANGES = ("user_annotation", "cpu_op")


def read_torch_trace(path: Path) -> list[Recording]:
    """Return the recordings of a trace, one for each device.

    Raises:
        ValueError: the file is not such a trace.
    """
    try:
        raw = path.read_bytes()
        trace = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (UnicodeDecodeError, ValueError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is neither JSON nor gzipped JSON: {error}") from None
    if isinstance(trace, list):  # the format allows a bare list of events
        trace = {"traceEvents": trace}
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"{path} has no traceEvents: give a trace that torch.profiler has exported")
    return from_torch_trace(trace, str(path))


def from_torch_trace(trace: dict[str, Any], source: str) -> list[Recording]:
    """Return the recordings of a trace that has been parsed. ``source`` says where it comes from."""
    events = [each for each in trace["traceEvents"] if _is_complete(each)]
    devices = {each["id"]: str(each.get("name", "")) for each in trace.get("deviceProperties") or ()}
    rank = (trace.get("distributedInfo") or {}).get("rank")
    return recordings(
        _ranges(events), _launches(events), _runs(events), devices, {} if rank is None else {_PROCESS: rank}, source
    )


_PROCESS = 0  # a trace is of one process; the events of a GPU have the GPU's number in place of a process


def _is_complete(event: Any) -> bool:
    return isinstance(event, dict) and event.get("ph") == "X" and all(key in event for key in ("ts", "cat", "name"))


def _times(event: dict[str, Any]) -> tuple[float, float]:
    start = float(event["ts"]) * _MILLI
    return start, start + float(event.get("dur", 0)) * _MILLI


def _ranges(events: Iterable[dict[str, Any]]) -> Iterable[Range]:
    for event in events:
        if event["cat"] in _RANGES and is_ours(str(event["name"])):
            yield Range(_PROCESS, event.get("tid"), *_times(event), str(event["name"]))


def _launches(events: Iterable[dict[str, Any]]) -> Iterable[Launch]:
    for event in events:
        number = _number(event)
        if event["cat"].lower() in _LAUNCHES and number is not None:
            yield Launch(_PROCESS, event.get("tid"), float(event["ts"]) * _MILLI, number)


def _runs(events: Iterable[dict[str, Any]]) -> list[Run]:
    runs = []
    for event in events:
        if event["cat"].lower() in _RUNS:
            given, number = event.get("args") or {}, _number(event)
            device, stream = int(given.get("device", 0)), f"stream {given.get('stream', '?')}"
            name = str(event["name"])
            runs.append(Run(_PROCESS, device, stream, *_times(event), name, -1 if number is None else number))
    return runs


def _number(event: dict[str, Any]) -> int | None:
    number = (event.get("args") or {}).get("correlation")
    return number if isinstance(number, int) else None
