"""Which runs of plans a call has made. `repeated` asks, to make later calls of the same kind in less time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_thread = threading.local()


@contextmanager
def recording() -> Iterator[list[Any]]:
    """Yield a list of the runs that are made inside the block, in this thread."""
    before = getattr(_thread, "runs", None)
    runs: list[Any] = []
    _thread.runs = runs
    try:
        yield runs
    finally:
        _thread.runs = before


def record_run(run: Any) -> None:
    """Add a `symm_overlap.collective.exchange.planned.run.Run` that has ended without an error."""
    runs = getattr(_thread, "runs", None)
    if runs is not None:
        runs.append(run)
