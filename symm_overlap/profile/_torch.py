"""The private APIs of torch's profiler: recording all threads, and whether it records. Checked on 2.11.0 and 2.13.0."""

from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler


def all_threads() -> Any:
    """Return the configuration of a profiler that records all threads, and not only the one that starts it."""
    return _ExperimentalConfig(profile_all_threads=True)


def is_recording() -> bool:
    """True if a profiler of torch records, in any thread."""
    return bool(profiler._is_profiler_enabled)
