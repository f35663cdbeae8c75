"""Looks after the waits of all lanes, from the host.

A GPU that waits for a signal cannot see whether the process of its peer lives, and a stream that waits without a kernel
(csrc/cuda/memory_wait.h) cannot even see a deadline. One thread of this process looks at all lanes, a few times a
second. It makes CUDA calls only for peers that have died and for waits that take long. They launch small kernels, so it
cannot disturb the capture of a graph.
"""

from __future__ import annotations

import threading
import time
import warnings
from typing import Protocol
from weakref import WeakSet


class Watched(Protocol):
    """A lane."""

    def look(self) -> None:
        """See to waits that take long, and to those for peers that have died."""


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
                try:
                    lane.look()
                except Exception as error:  # the other lanes are still to be looked after
                    warnings.warn(f"symm_overlap: looking after a lane failed: {error!r}", stacklevel=1)
            del lanes, lane  # a lane lives no longer for being looked after
