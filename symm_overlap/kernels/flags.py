"""Flags in one rank's own memory, between a fused kernel and the copies that it waits for, or that wait for it.

`device` says what a flag is. One set serves all calls of a lane, which follow one another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LINE = 32  # words from one flag to the next, as in `device`

TIMED_OUT = 1
"""The status where a kernel's wait has passed its limit, as in `device`."""

ABANDONED = 2
"""The status of flags that the host has given up: whatever waits for one returns."""


class Expired(NamedTuple):
    """A kernel's wait that passed its limit: for which chunk, and the epochs."""

    chunk: int
    expected: int
    found: int


class Flags:
    """Flags of one lane.

    Attributes:
        epoch: of the call that began last.
        seconds: how long a kernel of that call may wait for one flag.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.zeros(0, dtype=torch.int32, device=device)
        self.epoch, self.seconds, self._count = 0, 0.0, 0

    def begin(self, count: int, seconds: float) -> None:
        """Start a call that has ``count`` flags, all of them down."""
        if count > self._count:
            self._count = count
            self._memory = torch.full(((count + 1) * LINE,), self.epoch, dtype=torch.int32, device=self._device)
            self.status.zero_()
        self.epoch = (self.epoch + 1 + 2**31) % 2**32 - 2**31
        self.seconds = seconds

    @property
    def words(self) -> Tensor:
        """The flags, each on a line of its own."""
        return self._memory[: self._count * LINE]

    @property
    def status(self) -> Tensor:
        """The status line."""
        return self._memory[self._count * LINE :]

    def up(self, chunk: int) -> None:
        """Raise a flag, behind what the current stream has been given."""
        self.words[chunk * LINE] = self.epoch

    def expired(self) -> Expired | None:
        """What the first wait that passed its limit waited for. It waits for the kernel."""
        status, *what = self.status[:4].tolist()
        return Expired(*what) if status == TIMED_OUT else None

    def abandon(self) -> None:
        """End every wait for a flag, now and later."""
        self.status[0] = ABANDONED
