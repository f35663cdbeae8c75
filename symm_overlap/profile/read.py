"""Read a trace of any profiler that is known."""

from __future__ import annotations

import os
from pathlib import Path

from .nsight import read_nsight
from .recording import Recording
from .torch_trace import read_torch_trace

_SQLITE = b"SQLite format 3\0"


def read(path: str | os.PathLike[str]) -> list[Recording]:
    """Read a trace: one recording for each device of each process in it.

    Args:
        path: a Chrome trace that torch's profiler has exported, also gzipped; or a database that
            ``nsys export --type sqlite`` has written.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is neither of these.
    """
    file = Path(path)
    with file.open("rb") as opened:
        head = opened.read(len(_SQLITE))
    return read_nsight(file) if head == _SQLITE else read_torch_trace(file)
