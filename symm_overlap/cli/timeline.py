"""A trace of one training step, for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def trace_to(path: str) -> Iterator[None]:
    """Profiles the body and writes a Chrome trace to ``path``: the steps' ranges, every op, and GPU kernels if any."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(path)
