"""The link to a phantom: where a phantom's memory is, and at which pace copies may cross the link.

A copy crosses the link in pieces. Before the first piece, the link's clock is set to now if the link was idle for
longer than it takes to launch the next copy. After each piece, the stream waits until the link has been busy for as
long as the piece takes at the chosen speed. This slows down a copy that is quicker than the link. The time of small
kernels between the pieces is part of that wait.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from symm_overlap import _C

PIECE = 16 << 20
"""Bytes in a piece. At 369 GB/s a piece takes 45 us. A copy engine that is only a little quicker, and the two changes
between the copy engine and the kernel that keeps the pace, of a few microseconds each, have room in that time.
"""

TOLERANCE = 0.03
"""Largest relative error of a link's speed against the chosen speed."""

_UNITS = {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]B/s)")


@dataclass(frozen=True)
class Link:
    """The parsed value of ``--link``.

    Attributes:
        name: the original text.
        on_host: whether the phantoms' memory is pinned host memory. Otherwise it is memory of the device.
        bytes_per_second: the pace. None means that copies are not slowed down.
    """

    name: str
    on_host: bool = False
    bytes_per_second: float | None = None

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse a speed such as 369GB/s, or "pcie" or "device". Raise ValueError for anything else."""
        if text in ("pcie", "device"):
            return cls(text, on_host=text == "pcie")
        found = _SPEED.fullmatch(text.strip())
        speed = float(found[1]) * _UNITS[found[2]] if found else 0.0
        if not speed:
            raise ValueError(f"--link is {text!r}; give a speed such as 369GB/s or 0.5GB/s, or pcie, or device")
        return cls(text, bytes_per_second=speed)

    def nanoseconds(self, nbytes: int) -> int:
        """Return the time that so many bytes take, at least 1. The link must have a pace."""
        assert self.bytes_per_second is not None
        return max(1, round(nbytes / self.bytes_per_second * 1e9))


def link_line(reached: dict[str, Any]) -> str:
    """Format the chosen speed, the measured speed, and the verdict."""
    speed = f"{reached['bytes_per_second'] / 1e9:.3g} GB/s reached"
    if reached["kept"] is None:
        return f"{reached['link']}: {speed}, and no pace to keep"
    verdict = "kept" if reached["kept"] else "MISSED"
    return f"{reached['link']}: {speed}, {verdict} within {TOLERANCE:.0%}"


def pieces(units: int, unit_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut ``units`` (rows or bytes) into pieces of about equal size. Yield the first unit of each and its unit count.

    A piece has at most `PIECE` bytes, unless a single unit is larger.
    """
    count = -(-units // max(1, PIECE // unit_bytes))
    for index in range(count):
        begin, end = units * index // count, units * (index + 1) // count
        yield begin, end - begin


class Pacer(Protocol):
    """The clock of a link.

    Attributes:
        trial: seconds that a trial of the link takes. It must be many times as long as the uncertainty of the clock.
    """

    trial: float

    def pace(self, ns: int) -> None:
        """If ``ns`` is 0, note that a copy begins. Otherwise wait, on the current stream, until the link has been busy
        for ``ns`` more nanoseconds; see csrc/issue/driver.h.
        """

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the time of ``work`` on the device."""


class HostPacer:
    """A link that uses the clock of the host, for streams that are threads."""

    trial = 0.02
    _MOMENT = 100_000  # nanoseconds; a shorter gap between two copies does not count as idle
    _SLEEPS = 300_000  # nanoseconds; a thread sleeps only until so long before the end, because it may wake up late

    def __init__(self) -> None:
        self._busy_until = 0
        self._lock = threading.Lock()

    def pace(self, ns: int) -> None:
        """See `Pacer.pace`."""
        with self._lock:
            if ns == 0:
                if (now := time.monotonic_ns()) > self._busy_until + self._MOMENT:
                    self._busy_until = now
                return
            self._busy_until += ns
            end = self._busy_until
        while (left := end - time.monotonic_ns()) > 0:
            time.sleep((left - self._SLEEPS) / 1e9 if left > self._SLEEPS else 0)

    def seconds(self, work: Callable[[], object]) -> float:
        """See `Pacer.seconds`."""
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


class DevicePacer:
    """A link that uses the clock of a GPU.

    Attributes:
        clock: one int64 on the GPU, the time until which the link is busy, in the GPU's own time.
    """

    trial = 0.002  # long enough for the host to issue some hundred pieces ahead of the device
    _AHEAD = 20_000_000  # cycles, about 10 ms, in which the host may issue work

    def __init__(self, clock: Tensor) -> None:
        self.clock, self._times = clock, torch.zeros(2, dtype=torch.int64, device=clock.device)

    def pace(self, ns: int) -> None:
        """See `Pacer.pace`."""
        _C.pace(self.clock, ns)

    def seconds(self, work: Callable[[], object]) -> float:
        """See `Pacer.seconds`."""
        torch.cuda._sleep(self._AHEAD)
        _C.stamp(self._times, 0)
        work()
        _C.stamp(self._times, 1)
        begin, end = self._times.tolist()
        return (end - begin) / 1e9


def across(link: Link, pacer: Pacer, copy: Callable[[Tensor, Tensor], object], target: Tensor, source: Tensor) -> None:
    """Call ``copy(target, source)`` in pieces of rows, with the pace of the link. One of the two is a phantom's."""
    if link.bytes_per_second is None or not target.numel():
        copy(target, source)
        return
    pacer.pace(0)
    rows = target.shape[0]
    for begin, count in pieces(rows, target.nbytes // rows):
        copy(target[begin : begin + count], source[begin : begin + count])
        pacer.pace(link.nanoseconds(count * (target.nbytes // rows)))


class PacedProgram(_C.Program):
    """A program whose copies from and to phantoms cross a link.

    Args:
        is_phantom: whether an address is in a phantom's memory.
    """

    def __init__(self, link: Link, is_phantom: Callable[[int], bool]) -> None:
        super().__init__()
        self._link, self._is_phantom = link, is_phantom

    def copy(
        self, stream: int, to: tuple[int, int], source: tuple[int, int], rows: tuple[int, int, int, int], /
    ) -> None:
        """See `_C.Program.copy`."""
        count, nbytes, to_stride, source_stride = rows
        crosses = any(tensor < 0 and self._is_phantom(address) for tensor, address in (to, source))
        if not crosses or self._link.bytes_per_second is None or not count * nbytes:
            super().copy(stream, to, source, rows)
            return
        self.pace(stream, 0)
        if count == 1:  # a single row is cut into bytes
            count, nbytes, to_stride, source_stride = nbytes, 1, 1, 1
        for begin, units in pieces(count, nbytes):
            places = ((to[0], to[1] + begin * to_stride), (source[0], source[1] + begin * source_stride))
            piece = (1, units, 0, 0) if rows[0] == 1 else (units, *rows[1:])
            super().copy(stream, *places, piece)
            self.pace(stream, self._link.nanoseconds(units * nbytes))

    def meet_and_sum(
        self,
        stream: int,
        channel: int,
        partials: Sequence[_C.Operand],
        average: bool,
        out: _C.Operand,
        copy: _C.Operand | None,
        done_channel: int | None,
        received: int,
        /,
    ) -> None:
        """See `_C.Program.meet_and_sum`."""
        with self._crossing(stream, received):
            super().meet_and_sum(stream, channel, partials, average, out, copy, done_channel, received)

    def await_and_gather(
        self, stream: int, channel: int, sources: Sequence[int], part_bytes: int, out: _C.Operand, received: int, /
    ) -> None:
        """See `_C.Program.await_and_gather`."""
        with self._crossing(stream, received):
            super().await_and_gather(stream, channel, sources, part_bytes, out, received)

    @contextmanager
    def _crossing(self, stream: int, nbytes: int) -> Iterator[None]:
        """Pace a kernel that reads so many bytes across the link. It cannot be cut, so the stream waits after it."""
        paced = self._link.bytes_per_second is not None and nbytes
        if paced:
            self.pace(stream, 0)
        yield
        if paced:
            self.pace(stream, self._link.nanoseconds(nbytes))
