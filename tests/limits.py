"""Time limits for operations that take no time on an idle machine. Tests share their machine with other programs."""

from __future__ import annotations

import os
import select
import threading
import time

SOON = 10.0
"""Seconds for operations that must end before a deadline. Deadlines that must not be reached are much longer."""


class Death:
    """Records when a process has died, as this process learns of it.

    Killing a large process and freeing its memory takes time, so the time of the kill is not accurate enough. Create
    the object before the process dies. This process need not be its parent.
    """

    def __init__(self, pid: int) -> None:
        self._handle = os.pidfd_open(pid)
        self._at = float("inf")
        self._watch = threading.Thread(target=self._wait, daemon=True)
        self._watch.start()

    def _wait(self) -> None:
        select.select([self._handle], [], [])
        self._at = time.monotonic()
        os.close(self._handle)

    def seconds_ago(self) -> float:
        """Return the seconds since the death. The result is negative if the caller learned of it before this object."""
        now = time.monotonic()
        self._watch.join(SOON)
        return now - self._at
