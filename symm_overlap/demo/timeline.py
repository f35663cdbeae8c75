"""A trace of one training step, for chrome://tracing or Perfetto."""

from __future__ import annotations

import os
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
    with profile(activities=activities, acc_events=True, profile_memory=memory) as profiler:
        yield
    profiler.export_chrome_trace(path)
