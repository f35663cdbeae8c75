"""A lock that lets one thread at a time make a call, for example on a lane."""

from __future__ import annotations

import threading


class InMiddleOfCallError(RuntimeError):
    """Raised if a thread begins a call in the middle of one that holds the same lock. Nothing was done of it."""


class CallLock:
    """A lock that raises `InMiddleOfCallError` if a thread that holds it takes it again.

    A wait of a call runs Python's signal handlers. If a handler takes the same lock, it would wait for its own thread
    without end.

    Args:
        call: which call holds the lock, as users know it.
        advice: what they can do.
    """

    def __init__(self, call: str, advice: str) -> None:
        self._call, self._advice, self._lock, self._held = call, advice, threading.RLock(), False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._held:  # by this thread, as the lock was free for it
            self._lock.release()
            raise InMiddleOfCallError(
                f"symm_overlap: this thread is in the middle of {self._call}, and begins another one there, as a "
                f"signal handler may: {self._advice}"
            )
        self._held = True

    def __exit__(self, *error: object) -> None:
        self._held = False
        self._lock.release()
