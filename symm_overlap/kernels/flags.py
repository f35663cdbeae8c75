"""Flags in one rank's own memory, between a fused kernel and the copies that it waits for, or that wait for it.

`device` defines what a flag is. One set of flags serves all calls of a lane, which run one after another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LINE = 32  # words from one flag to the next, as in `device`

EPOCH = 4
"""The index of the word of the status line that is the epoch of the call, as in `device`."""

TIMED_OUT = 1
"""The status after a kernel's wait has passed its limit, as in `device`."""

ABANDONED = 2
"""The status after the host has given up: every wait for a flag returns."""

INTERRUPTED = 3
"""The status that makes an interpreted kernel stop waiting. It is run again later if a wait has missed its flag."""

MISSED = 5
"""The index of the status word that is 1 after a wait of an interpreted kernel has returned without its flag, as in
`device`.
"""

FEWEST = 64
"""The initial number of flags: enough for eight ranks with eight chunks each."""

_PAUSE = 1e-4
"""Seconds between two polls of a flag, so that the interpreter can run meanwhile."""


class Caller(NamedTuple):
    """Who made a call, and the number of chunks of each rank's rows in it: the facts for an error message."""

    op: str
    group: str
    lane: int
    rank: int
    world: int
    chunks: int


class Expired(NamedTuple):
    """A kernel's wait that passed its limit: the chunk, the expected and found epochs, and the call."""

    chunk: int
    expected: int
    found: int
    caller: Caller

    def __str__(self) -> str:
        caller = self.caller
        owner, piece = divmod(self.chunk, caller.chunks)
        return (
            f"symm_overlap: {caller.op}, group {caller.group!r} (lane {caller.lane}), rank {caller.rank} of "
            f"{caller.world}: its kernel has waited until its deadline for chunk {piece} of rank {owner}: expected "
            f"epoch {self.expected}, found {self.found}"
        )


class Flags:
    """The flags of one lane, raised and awaited by threads of the host, for kernels in Triton's interpreter.

    Attributes:
        status: the status line. It is not reallocated with the flags, so that nothing in it is lost.
        words: the flags, each on a separate line.
        count: the number of flags.
        counters: for each chunk, how many of its tiles are done; 0 between calls.
        seconds: how long a kernel of the latest call may wait for one flag.
        native: what a program of C++ raises and awaits (csrc/issue/flags.h); None if only Python can.
        reported: whether an error about a wait that passed its limit was already raised.
    """

    reported = False
    count = 0
    _counted_ahead = 0  # how far, between calls, the status line is ahead of the epoch of the last call
    _caller: Caller

    def __init__(self, device: torch.device) -> None:
        self.status = self._new(lambda: torch.zeros(LINE, dtype=torch.int32, device=device))
        self.status[EPOCH] = self._counted_ahead
        self.words = self.counters = self.status[:0]
        self.native = self._new_native()
        self.grow(FEWEST)
        self.seconds = 0.0
        self._error: BaseException | None = None
        self._guard = threading.Lock()  # protects the status from other threads of the host

    def prepare(self, count: int) -> None:
        """`grow`, for calls on any stream."""
        self.grow(count)

    def begin(self, count: int, seconds: float, caller: Caller) -> None:
        """Start a call that has ``count`` flags. All of them are down."""
        self.grow(count)
        self.status[EPOCH] = (self.epoch + 1 + 2**31) % 2**32 - 2**31
        self.seconds, self._caller = seconds, caller

    def failure(self) -> Expired | None:
        """Return what the first wait that passed its limit waited for, as far as the host knows so far; else None."""
        status, chunk, expected, found = self.status[:EPOCH].tolist()
        return Expired(chunk, expected, found, self._caller) if status == TIMED_OUT else None

    @property
    def epoch(self) -> int:
        """The epoch of the latest call."""
        return int(self.status[EPOCH])

    def grow(self, count: int) -> None:
        """Allocate flags, between two calls of the lane, if there are fewer than ``count``."""
        if count > self.count:
            count = max(count, 2 * self.count)
            self.counters = self._new(lambda: self.status.new_zeros(count))
            last = self.status[EPOCH] - self._counted_ahead
            self.words = self._new(lambda: last.expand(count * LINE).contiguous())  # down in all later calls
            self.count = count

    def _new(self, make: Callable[[], Tensor]) -> Tensor:
        """Return a new tensor that lives as long as the lane."""
        return make()

    def _new_native(self) -> Any:
        return None

    def up(self, chunk: int) -> None:
        """Raise a flag, after the work enqueued so far on the current stream."""
        self.words[chunk * LINE] = self.status[EPOCH]

    def wait(self, chunk: int, seconds: float) -> bool:
        """Block the current stream until a flag is up. Return False if it is not up after ``seconds``.

        Raises:
            The error because of which the host has given up the flags.
        """
        word, deadline = self.words[chunk * LINE], time.monotonic() + seconds
        while (int(word) - self.epoch) % 2**32 >= 2**31:
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True

    def abandon(self, error: BaseException) -> None:
        """End every wait for a flag, now and later, because of an error on the host."""
        with self._guard:
            self._error = self._error or error
            self.status[0] = ABANDONED

    def interrupt(self) -> None:
        """End the waits of an interpreted kernel, unless there is a failure."""
        with self._guard:
            if self.status[0] == 0:
                self.status[0] = INTERRUPTED

    def resume(self) -> bool:
        """End an interruption. Return whether the kernel has to be run again because a wait of it was interrupted."""
        with self._guard:
            interrupted, missed = int(self.status[0]) == INTERRUPTED, int(self.status[MISSED]) == 1
            if interrupted:
                self.status[0] = 0
            self.status[MISSED] = 0
        return interrupted and missed
