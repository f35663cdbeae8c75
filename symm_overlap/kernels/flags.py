"""Flags in one rank's own memory, between a fused kernel and the copies that it waits for, or that wait for it.

`device` says what a flag is. One set serves all calls of a lane, which follow one another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LINE = 32  # words from one flag to the next, as in `device`

EPOCH = 4
"""Which word of the status line is the epoch of the call, as in `device`."""

TIMED_OUT = 1
"""The status where a kernel's wait has passed its limit, as in `device`."""

ABANDONED = 2
"""The status of flags that the host has given up: whatever waits for one returns."""

INTERRUPTED = 3
"""The status where a kernel in the interpreter is asked to wait no longer, and to be run again later if it has to."""

MISSED = 5
"""Which word of the status line is 1 once a wait of a kernel in the interpreter has returned without its flag, as in
`device`."""

CALL = 6
"""Which word of the status line says which call it is, as in `device`."""

FEWEST = 64
"""Flags that there are from the beginning: those of eight ranks with eight chunks each."""

_PAUSE = 1e-4
"""Seconds between two looks at a flag, for the interpreter to go on meanwhile."""


class Caller(NamedTuple):
    """Whose call it is, and how many chunks each rank's rows have in it: what an error says."""

    op: str
    group: str
    lane: int
    rank: int
    world: int
    chunks: int


class Expired(NamedTuple):
    """A kernel's wait that passed its limit: for which chunk, the epochs, and in whose call."""

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
    """Flags of one lane, raised and waited for by threads of the host, for kernels in Triton's interpreter.

    Attributes:
        status: the status line, which stays where it is, so that nothing in it is lost when there are more flags.
        words: the flags, each on a line of its own.
        counters: for each chunk, how many of its tiles are done: 0 between calls.
        seconds: how long a kernel of the call that began last may wait for one flag.
        reported: whether somebody was told of a wait that passed its limit.
    """

    reported = False
    _caller: Caller

    def __init__(self, device: torch.device) -> None:
        self.status = torch.zeros(LINE, dtype=torch.int32, device=device)
        self.words = self.counters = self.status[:0]
        self._grow(FEWEST)
        self.seconds = 0.0
        self._error: BaseException | None = None
        self._guard = threading.Lock()  # of the status, among threads of the host

    @property
    def count(self) -> int:
        """How many flags there are."""
        return len(self.counters)

    def prepare(self, count: int) -> None:
        """Make what a call with ``count`` flags would make, between two calls of the lane."""
        self._grow(count)

    def kernels(self, outputs: Sequence[Tensor], ahead: Callable[..., None]) -> None:
        """Hand every kernel that the flags of a call with such ``outputs`` launch to ``ahead``, with its arguments and
        options. Threads of the host have none.
        """

    def begin(self, count: int, seconds: float, caller: Caller) -> None:
        """Start a call that has ``count`` flags, all of them down."""
        self._grow(count)
        self.status[EPOCH] = (self.epoch + 1 + 2**31) % 2**32 - 2**31
        self.seconds, self._caller = seconds, caller

    def failure(self) -> Expired | None:
        """What the first wait that passed its limit waited for, as far as the host knows by now."""
        status, chunk, expected, found = self.status[:EPOCH].tolist()
        return Expired(chunk, expected, found, self._caller) if status == TIMED_OUT else None

    @property
    def epoch(self) -> int:
        """The epoch of the call that began last."""
        return int(self.status[EPOCH])

    def _grow(self, count: int) -> None:
        if count > self.count:
            count = max(count, 2 * self.count)
            self.counters = torch.zeros(count, dtype=torch.int32, device=self.status.device)
            self.words = self.status[EPOCH].expand(count * LINE).contiguous()  # down in every call to come

    def up(self, chunk: int) -> None:
        """Raise a flag, behind what the current stream has been given."""
        self.words[chunk * LINE] = self.status[EPOCH]

    def wait(self, chunk: int, seconds: float) -> bool:
        """Hold up the current stream until a flag is up; False if it is not by then.

        Raises:
            The error for which the host has given up the flags.
        """
        word, deadline = self.words[chunk * LINE], time.monotonic() + seconds
        while (int(word) - self.epoch) % 2**32 >= 2**31:
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True

    def finish(self, outputs: Sequence[Tensor]) -> Expired | None:
        """End a call. Return its `failure`, if that is known; otherwise nobody may take ``outputs`` for a result, and
        the next call is told.
        """
        return self.failure()

    def abandon(self, error: BaseException) -> None:
        """End every wait for a flag, now and later, because of an error of the host."""
        with self._guard:
            self._error = self._error or error
            self.status[0] = ABANDONED

    def interrupt(self) -> None:
        """End the waits of a kernel in the interpreter, if all is well otherwise."""
        with self._guard:
            if self.status[0] == 0:
                self.status[0] = INTERRUPTED

    def resume(self) -> bool:
        """Whether a kernel has to be run again, since a wait of it has been interrupted; from now on none is."""
        with self._guard:
            interrupted, missed = int(self.status[0]) == INTERRUPTED, int(self.status[MISSED]) == 1
            if interrupted:
                self.status[0] = 0
            self.status[MISSED] = 0
        return interrupted and missed
