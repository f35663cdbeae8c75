"""The signals that end a program: kept waiting where they must not interrupt, and turned into exceptions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def held() -> Iterator[None]:
    """Keep the signals that end a program waiting until the end of the body.

    Inside it no exception can come between a process that starts and the note that it has started. A process that is
    started inside begins with these signals blocked, so that an early Ctrl-C cannot make its interpreter print a
    traceback.
    """
    came: list[int] = []
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    # The mask is this thread's alone. The kernel may give a signal to another thread, such as one of the store, and
    # Python would then still run its handler here.
    with _handlers(lambda number, _: came.append(number)):
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number in came:
        signal.raise_signal(number)


@contextmanager
def raising() -> Iterator[None]:
    """In the body SIGINT raises KeyboardInterrupt, and the others SystemExit with the exit code that a shell shows."""

    def end(number: int, frame: object) -> object:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with _handlers(end):
        yield


@contextmanager
def _handlers(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Let ``handler`` handle the signals that end a program and that are not ignored, as SIGHUP is under nohup."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        for number in HANDLED:
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number in HANDLED:
            signal.signal(number, before[number])
