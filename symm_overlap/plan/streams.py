"""Streams on the CPU: the calling thread alone, or one thread for each stream, with events between the threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

from .execute import Table, at_step
from .program import Item, Program


class InlineStreams:
    """Run every step on the calling thread, in the plan's order.

    Use it for plans in which one stream has all the waits for peers.
    """

    def run(self, program: Program, table: Table) -> None:
        """Run the program's steps; see `execute`."""
        get = table.get
        for item in program.items:
            function = get(item.kind)
            if function is not None:
                try:
                    function(item.step)
                except BaseException as error:
                    raise at_step(error, item)  # noqa: B904 (the same exception)


class ThreadStreams:
    """Run the caller's stream on the calling thread, and every other stream on a thread of its own.

    The threads are kept for the next call. One program runs at a time; calls from several threads take turns. Ops that
    are to overlap in time need separate `ThreadStreams`. Otherwise ranks that start the ops in a different order would
    wait for each other for ever.

    Args:
        context: a context manager that every thread enters and keeps until it ends, for settings that are per thread,
            such as ``torch.no_grad``.
        abandon: called when a stream fails or is interrupted by Ctrl-C. It must end whatever steps of other streams may
            be waiting for.
    """

    def __init__(
        self,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        abandon: Callable[[], object] = lambda: None,
    ) -> None:
        self._context, self._abandon = context, abandon
        self._queues: dict[str, SimpleQueue[_Run | None]] = {}  # by stream; None ends the thread
        self._one_at_a_time = threading.Lock()
        weakref.finalize(self, _stop, self._queues)

    def run(self, program: Program, table: Table) -> None:
        """Run the program's steps; see `execute`. When it returns or raises, no stream is running any of them."""
        with self._one_at_a_time:
            caller, *others = program.streams
            if not others:
                InlineStreams().run(program, table)
                return
            run = _Run(program, table, self._abandon)
            try:
                for name in others:
                    self._queue(name).put(run)
                run.stream(caller)
            except BaseException as error:  # Ctrl-C between two steps
                run.fail(error)
                for name in others:  # a thread that has this run already, or has finished it, does nothing more
                    self._queue(name).put(run)
            run.join()
        if run.error is not None:
            raise run.error

    def close(self) -> None:
        """End the threads. The next run starts new ones."""
        with self._one_at_a_time:
            _stop(self._queues)

    def _queue(self, name: str) -> SimpleQueue[_Run | None]:
        if name not in self._queues:
            queue: SimpleQueue[_Run | None] = SimpleQueue()
            # The thread must not refer to self, or self would never be collected and the thread never end.
            threading.Thread(
                target=_serve, args=(queue, name, self._context), name=f"stream {name}", daemon=True
            ).start()
            self._queues[name] = queue
        return self._queues[name]


class _Run:
    """One run of a program. An event is a lock held until the event is set. A waiter acquires and releases it."""

    def __init__(self, program: Program, table: Table, abandon: Callable[[], object]) -> None:
        self._streams, self._table, self._abandon = program.streams, table, abandon
        self._events = [_held() for _ in range(program.events)]
        self._guard = threading.Lock()
        self.running = {name: _held() for name in list(program.streams)[1:]}
        self.error: BaseException | None = None

    def stream(self, name: str) -> None:
        """Run the steps of one stream. After an error in any stream, stop at the next step."""
        get, events = self._table.get, self._events
        for item in self._streams[name]:
            try:
                for event in item.waits:
                    events[event].acquire()
                    _release(events[event])
                if self.error is not None:
                    return
                function = get(item.kind)
                if function is not None:
                    function(item.step)
            except BaseException as error:
                self.fail(error, item)
                return
            if item.event is not None:
                _release(events[item.event])

    def join(self) -> None:
        """Wait until every other stream has ended, even if Ctrl-C interrupts the wait."""
        while self.running:
            try:
                for end in list(self.running.values()):
                    end.acquire()
            except BaseException as error:  # the lock may have been acquired, so only self.running says what has ended
                self.fail(error)

    def fail(self, error: BaseException, item: Item | None = None) -> None:
        """End the run. The first error is kept."""
        with self._guard:
            if self.error is None:
                self.error = error if item is None else at_step(error, item)
        for event in self._events:  # no stream stays blocked on an event that will never be set
            _release(event)
        self._abandon()


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _release(lock: threading.Lock) -> None:
    try:  # noqa: SIM105 (suppress costs more than the release)
        lock.release()
    except RuntimeError:  # a failed run has set every event already
        pass


def _serve(queue: SimpleQueue[_Run | None], name: str, context: Callable[[], AbstractContextManager[object]]) -> None:
    with context():
        while (run := queue.get()) is not None:
            run.stream(name)
            running = run.running
            del run  # its table holds the caller's tensors
            if (end := running.pop(name, None)) is not None:
                end.release()


def _stop(queues: dict[str, SimpleQueue[_Run | None]]) -> None:
    for queue in queues.values():
        queue.put(None)
    queues.clear()
