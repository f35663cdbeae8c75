"""Profile a block of a program with torch's profiler."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ._torch import all_threads
from .recording import Recording
from .report import report
from .torch_trace import from_torch_trace


class Recorded:
    """What `record` has recorded. It is complete after the block.

    Attributes:
        recordings: one for each device; empty inside the block.
    """

    def __init__(self) -> None:
        self.recordings: Sequence[Recording] = ()

    def __str__(self) -> str:
        return report(self.recordings)


@contextmanager
def record(trace: str | os.PathLike[str] | None = None) -> Iterator[Recorded]:
    """Profile a block on this rank, with torch's profiler::

        with symm_overlap.profile.record() as recorded:
            step()
        print(recorded)

    Run the block once before, so that nothing is loaded or compiled inside. Profiling makes the host slower, so calls
    that are bound by the host take longer than without it. Only one profiler of torch can record at a time.

    Args:
        trace: where to write the trace too, if given: for Perfetto, or for ``symm-overlap profile``.

    Raises:
        OSError: the trace cannot be written.
    """
    gpus = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpus else [])]
    recorded = Recorded()
    with profile(activities=activities, acc_events=True, experimental_config=all_threads()) as profiler:
        yield recorded
        if gpus:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(written))
        text = written.read_text()
    if trace is not None:
        Path(trace).write_text(text)
    recorded.recordings = from_torch_trace(json.loads(text), "this process" if trace is None else str(trace))
