"""Flags in one rank's own memory, between a fused kernel and the copies that it waits for, or that wait for it.

`device` says what a flag is. One set serves all calls of a lane, which follow one another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LINE = 32  # words from one flag to the next, as in `device`

TIMED_OUT = 1
"""The status where a kernel's wait has passed its limit, as in `device`."""

ABANDONED = 2
"""The status of flags that the host has given up: whatever waits for one returns."""


_PAUSE = 1e-4
"""Seconds between two looks at a flag, for the interpreter to go on meanwhile."""


class Expired(NamedTuple):
    """A kernel's wait that passed its limit: for which chunk, and the epochs."""

    chunk: int
    expected: int
    found: int


class Flags:
    """Flags of one lane, raised and waited for by threads of the host, for kernels in Triton's interpreter.

    Attributes:
        epoch: of the call that began last.
        seconds: how long a kernel of that call may wait for one flag.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.zeros(LINE, dtype=torch.int32, device=device)
        self._error: BaseException | None = None
        self.epoch, self.seconds, self._count = 0, 0.0, 0

    def require_usable(self) -> None:
        """Raises RuntimeError where a call cannot use the flags: while a CUDA graph is captured."""

    def begin(self, count: int, seconds: float) -> Expired | None:
        """Start a call that has ``count`` flags, all of them down. Return what an earlier call has not been told."""
        if count > self._count:
            self._count = count
            self._memory = torch.zeros((2 * count + 1) * LINE, dtype=torch.int32, device=self._device)
            self.words.fill_(self.epoch)
        self.epoch = (self.epoch + 1 + 2**31) % 2**32 - 2**31
        self.seconds = seconds
        return None

    @property
    def words(self) -> Tensor:
        """The flags, each on a line of its own."""
        return self._memory[LINE : (1 + self._count) * LINE]

    @property
    def counters(self) -> Tensor:
        """For each chunk, how many of its tiles are done: 0 between calls."""
        return self._memory[(1 + self._count) * LINE :]

    @property
    def status(self) -> Tensor:
        """The status line."""
        return self._memory[:LINE]

    def up(self, chunk: int) -> None:
        """Raise a flag, behind what the current stream has been given."""
        self.words[chunk * LINE] = self.epoch

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
        """End a call. Return what the first wait of its kernel that passed its limit waited for, if that is known;
        otherwise nobody may take ``outputs`` for a result, and the next call is told.
        """
        status, *what = self.status[:4].tolist()
        return Expired(*what) if status == TIMED_OUT else None

    def abandon(self, error: BaseException) -> None:
        """End every wait for a flag, now and later, because of an error of the host."""
        self._error = self._error or error
        self.status[0] = ABANDONED
