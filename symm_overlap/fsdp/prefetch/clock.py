"""When things happen on the stream that is current: events on an accelerator, the host's clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Stamp = Any


class HostClock:
    """For devices whose work is done when the call returns."""

    def now(self) -> Stamp:
        """A moment."""
        return time.perf_counter()

    def settle(self) -> None:
        """Wait until all moments are known."""

    def between(self, start: Stamp, end: Stamp) -> float:
        """Milliseconds from one moment to another."""
        return float(end - start) * 1e3


class EventClock:
    """For accelerators: moments of the stream that is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Callable[..., Any] = torch.get_device_module(device).Event

    def now(self) -> Stamp:
        """See `HostClock`."""
        event = self._event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """See `HostClock`."""
        torch.accelerator.synchronize(self._device)

    def between(self, start: Stamp, end: Stamp) -> float:
        """See `HostClock`. 0 where the streams of two moments passed them the other way round."""
        return max(0.0, float(start.elapsed_time(end)))


def clock_of(device: torch.device) -> HostClock | EventClock:
    """The clock of a device."""
    return HostClock() if device == torch.device("cpu") else EventClock(device)
