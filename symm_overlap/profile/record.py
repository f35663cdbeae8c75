"""Profile a block of a program with torch's profiler."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ._torch import all_threads, is_recording
from .recording import Recording
from .report import report
from .torch_trace import read_torch_trace


class Recorded:
    """What `record` has recorded. It is complete after the block.

    Attributes:
        recordings: one for each device; empty inside the block.
    """

    def __init__(self) -> None:
        self.recordings: Sequence[Recording] = ()

    def __str__(self) -> str:
        return report(self.recordings)


_only_one = threading.Lock()


@contextmanager
def record(trace: str | os.PathLike[str] | None = None) -> Iterator[Recorded]:
    """Profile a block on this rank, with torch's profiler::

        with symm_overlap.profile.record() as recorded:
            step()
        print(recorded)

    Run the block once before, so that nothing is loaded or compiled inside. Profiling makes the host slower, so calls
    that are bound by the host take longer than without it. Only one profiler of torch can record at a time, in all
    threads together.

    Args:
        trace: where to write the trace too, if given: for Perfetto, or for ``symm-overlap profile``. It is compressed
            if the name ends in ".gz".

    Raises:
        RuntimeError: another profiler of torch records already; or the block has started one, which has ended this one.
        OSError: the trace cannot be written. The recordings are complete even so.
    """
    if is_recording() or not _only_one.acquire(blocking=False):
        raise RuntimeError("profile.record: another profiler of torch is recording, and only one can at a time")
    try:
        yield from _record(trace)
    finally:
        _only_one.release()


def _record(trace: str | os.PathLike[str] | None) -> Iterator[Recorded]:
    gpus = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpus else [])]
    recorded = Recorded()
    with profile(activities=activities, acc_events=True, experimental_config=all_threads()) as profiler:
        yield recorded
        if gpus:
            torch.cuda.synchronize()
        if not is_recording():  # torch would crash when it writes the trace
            raise RuntimeError("profile.record: another profiler of torch was started in the block, and ended this one")
    with tempfile.TemporaryDirectory() as folder:
        # The name's ending tells torch whether to compress the file.
        written = Path(folder) / ("trace.json.gz" if str(trace).endswith(".gz") else "trace.json")
        profiler.export_chrome_trace(str(written))
        source = "this process" if trace is None else str(trace)
        recorded.recordings = [replace(each, source=source) for each in read_torch_trace(written)]
        if trace is not None:
            shutil.copyfile(written, trace)
