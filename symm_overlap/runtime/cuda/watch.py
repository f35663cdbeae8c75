"""Looks whether the processes of the peers of lanes live: a GPU that waits for a signal cannot.

One thread of this process looks after all lanes, a few times a second. It makes no CUDA call but for a peer that has
died, so it cannot disturb the capture of a graph, and the waits of a replayed graph end too.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol
from weakref import WeakSet


class Watched(Protocol):
    """A lane."""

    def look_for_deaths(self) -> bool:
        """End the waits for peers that have died. False once there is nobody left to look after."""


class Watch:
    """Looks after lanes for as long as they live.

    Args:
        seconds: between two looks.
    """

    def __init__(self, seconds: float = 0.25) -> None:
        self._seconds = seconds
        self._lanes: WeakSet[Watched] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def look_after(self, lane: Watched) -> None:
        """From now on."""
        with self._lock:
            self._lanes.add(lane)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="symm_overlap watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(self._seconds)
            with self._lock:
                lanes = list(self._lanes)
                if not lanes:
                    self._thread = None
                    return
            for lane in lanes:
                if not lane.look_for_deaths():
                    with self._lock:
                        self._lanes.discard(lane)
            del lanes, lane  # a lane lives no longer for being looked after
