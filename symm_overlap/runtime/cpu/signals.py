"""Signals between the ranks of a lane: what the plan's signal and wait steps do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from .._torch import SymmetricMemory


def naming(op: str, error: dist.DistBackendError) -> dist.DistBackendError:
    """``error`` with the name of the op that it ended."""
    return dist.DistBackendError(f"{op}: {error}")


class Signals(Protocol):
    """A channel from each rank to each rank, on which the n-th wait returns after the n-th signal.

    A signal releases everything that its stream did before; a wait acquires it.
    """

    def begin(self, op: str, timeout: float) -> None:
        """Before the first step of a call: what its waits report, and the seconds that each may last."""

    def signal(self, peer: int, channel: int) -> None:
        """Tell ``peer`` on ``channel``."""

    def wait(self, peer: int, channel: int) -> None:
        """Hold this stream until ``peer`` has signalled; past the deadline, fail."""

    def poison(self, outputs: Sequence[Tensor]) -> None:
        """After the last step: make sure that nobody takes the outputs of a failed wait for a result."""


class CpuSignals:
    """Signals through the epochs next to a CPU workspace."""

    def __init__(self, handle: SymmetricMemory) -> None:
        self.signal = handle.put_signal
        self._wait = handle.wait_signal
        self._op = ""
        self._timeout_ms = 0

    def begin(self, op: str, timeout: float) -> None:
        """Set the deadline here, in the caller's thread: the waits may run on other streams' threads."""
        self._op, self._timeout_ms = op, max(1, round(timeout * 1000))

    def wait(self, peer: int, channel: int) -> None:
        """Block the calling thread until ``peer`` has signalled on ``channel``."""
        try:
            self._wait(peer, channel, self._timeout_ms)
        except dist.DistBackendError as error:
            raise naming(self._op, error) from None

    def poison(self, outputs: Sequence[Tensor]) -> None:
        """Nothing: a failed wait raised, so there are no outputs."""
