"""A trace of one training step, for chrome://tracing or Perfetto."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def trace_to(path: str, memory: bool = False) -> Iterator[None]:
    """Profile the body and write a Chrome trace to ``path``, with the ranges of the step, every op and GPU kernel.

    With ``memory``, the trace also has every allocation.
    """
    # The C++ part of the profiler reads this when it first starts. Without it, it prints its own progress over the bar.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, profile_memory=memory)
    with warnings.catch_warnings():  # torch 2.11 warns even in the first cycle that events of earlier ones are cleared
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        profiler.start()
    try:
        yield
    finally:
        profiler.stop()
    profiler.export_chrome_trace(path)
