"""How long something may take that takes no time on an idle machine. Tests run beside others, on any machine."""

from __future__ import annotations

import os
import select
import threading
import time

SOON = 10.0
"""Seconds for what must not last until a deadline; deadlines that are not to be met are longer by far."""


class Death:
    """When a process has died, as this one learns of it: to kill and to clear away a large process takes time too.

    Made before it dies, by a process that need not be its parent.
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
        """Seconds since then; below 0 if whoever asks has learned of it first."""
        now = time.monotonic()
        self._watch.join(SOON)
        return now - self._at
