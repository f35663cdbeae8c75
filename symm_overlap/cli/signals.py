"""Handle the signals that end a program: delay them where they must not interrupt, or turn them into exceptions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Delay the signals that end a program until the end of the body.

    Inside the body, no exception can be raised between the start of a process and the assignment that records it. A
    process that is started inside begins with these signals blocked, so that an early Ctrl-C cannot make its
    interpreter print a traceback.
    """
    came: list[int] = []
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    # The mask applies to this thread only. The kernel may deliver a signal to another thread, such as a thread of the
    # store, and Python would then still run the signal's handler in this thread.
    with _handlers(lambda number, _: came.append(number)):
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number in came:
        signal.raise_signal(number)


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn the signals that end a program into exceptions inside the body.

    SIGINT raises KeyboardInterrupt. The other signals raise SystemExit with the exit code that a shell shows for them.
    """

    def end(number: int, frame: object) -> object:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with _handlers(end):
        yield


@contextmanager
def _handlers(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Install ``handler`` for the signals that end a program, except for ignored ones, such as SIGHUP under nohup."""
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
