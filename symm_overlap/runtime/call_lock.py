"""The lock of a lane, which lets one thread at a time make a call."""

from __future__ import annotations

import threading


class CallLock:
    """A lock that raises an error if a thread that holds it takes it again.

    A wait of a call runs Python's signal handlers. If a handler makes a call on the same lane, it would wait for its
    own thread without end.

    Args:
        lane: how the user knows the lane.
    """

    def __init__(self, lane: str) -> None:
        self._lane, self._lock, self._held = lane, threading.RLock(), False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._held:  # by this thread, as the lock was free for it
            self._lock.release()
            raise RuntimeError(
                f"symm_overlap: this thread is in the middle of a call on {self._lane}, and begins another one there, "
                "as a signal handler may: make the other call on another lane (symm_overlap.lane), on every rank"
            )
        self._held = True

    def __exit__(self, *error: object) -> None:
        self._held = False
        self._lock.release()
