"""Signals between the ranks of a lane: what the plan's signal and wait steps do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from .. import _C


def naming(op: str, error: dist.DistBackendError) -> dist.DistBackendError:
    """``error`` with the name of the op that it ended."""
    return dist.DistBackendError(f"{op}: {error}")


class Signals(Protocol):
    """A channel from each rank to each rank, on which the n-th wait returns after the n-th signal.

    A signal releases everything that its stream did before; a wait acquires it.
    """

    def begin(self, op: str, timeout: float, call_hash: int = 0, number: int = 0) -> None:
        """Before the first step of a call.

        Args:
            op: what the call's waits report.
            timeout: the seconds that each wait may last.
            call_hash: of everything that must be the same on every rank, 64 bits, not negative; 0 compares nothing.
            number: this rank's count of the calls that it has made on the lane: one more with every call.
        """

    def signal(self, peer: int, channel: int) -> None:
        """Tell ``peer`` on ``channel``."""

    def wait(self, peer: int, channel: int) -> None:
        """Hold this stream until ``peer`` has signalled; past the deadline, fail."""

    def poison(self, outputs: Sequence[Tensor]) -> None:
        """After the last step: make sure that nobody takes the outputs of a failed wait for a result."""


class CpuSignals:
    """Signals through the epochs next to a CPU workspace."""

    def __init__(self, workspace: Tensor, group_name: str) -> None:
        self._lane = _C.CpuLane(workspace, group_name)
        self.signal = self._lane.signal
        self._wait = self._lane.wait
        self._op = ""

    def begin(self, op: str, timeout: float, call_hash: int = 0, number: int = 0) -> None:
        """Announce the call, and set the deadline here, in the caller's thread: waits may run on other threads."""
        self._op = op
        self._lane.begin(max(1, round(timeout * 1000)), call_hash, number)

    def wait(self, peer: int, channel: int) -> None:
        """Block the calling thread until ``peer`` has signalled on ``channel``.

        Raises:
            DistBackendError: past the deadline, when the peer is gone, and when it is in another call than this rank.
        """
        try:
            self._wait(peer, channel)
        except dist.DistBackendError as error:
            raise naming(self._op, error) from None

    def poison(self, outputs: Sequence[Tensor]) -> None:
        """Nothing: a failed wait raised, so there are no outputs."""
