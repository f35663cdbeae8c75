"""The private API of torch by which its profiler records all threads. Checked on torch 2.11.0 and 2.13.0."""

from typing import Any

from torch._C._profiler import _ExperimentalConfig


def all_threads() -> Any:
    """Return the configuration of a profiler that records all threads, and not only the one that starts it."""
    return _ExperimentalConfig(profile_all_threads=True)
