"""Timestamps on the current stream: events on an accelerator, the host's clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Stamp = Any


class HostClock:
    """A clock for devices whose work is done when the call returns."""

    def now(self) -> Stamp:
        """Return a timestamp."""
        return time.perf_counter()

    def settle(self) -> None:
        """Wait until all timestamps are known."""

    def between(self, start: Stamp, end: Stamp) -> float:
        """Return the milliseconds from one timestamp to another."""
        return float(end - start) * 1e3


class EventClock:
    """A clock for accelerators: its timestamps are events on the current stream."""

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
        """See `HostClock`. Returns 0 if ``end``, on another stream, was reached before ``start``."""
        return max(0.0, float(start.elapsed_time(end)))


def clock_of(device: torch.device) -> HostClock | EventClock:
    """Return the clock of a device."""
    return HostClock() if device == torch.device("cpu") else EventClock(device)
