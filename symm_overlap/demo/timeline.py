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
    """Profiles the body and writes a Chrome trace to ``path``: the steps' ranges, every op, and GPU kernels if any.

    With ``memory`` it has every allocation too.
    """
    # The profiler's C++ part reads this when it first starts; else it writes its own progress over the bar.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, profile_memory=memory)
    with warnings.catch_warnings():  # torch 2.11 says of the first cycle too that it clears the events of earlier ones
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        profiler.start()
    try:
        yield
    finally:
        profiler.stop()
    profiler.export_chrome_trace(path)
