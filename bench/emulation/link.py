"""The link to a phantom: where a phantom's memory is, and at which pace copies may cross the link.

On a GPU, a copy across a link with a pace is a copy of fewer bytes from or to host memory, which takes as long
(csrc/cuda/emulated_link.h).

On a CPU, a copy crosses the link in pieces. Before the first piece, the link's clock is set to now if the link was idle
for a moment. After each piece, the stream waits until the link has been busy for as long as the piece takes at the
chosen speed. This slows down a copy that is quicker than the link.

Kernels that read the memory of phantoms are followed by such a wait on both.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from symm_overlap import _C

PIECE = 16 << 20
"""Bytes in a piece of a copy on a CPU."""

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
        bytes_per_second: the pace. None means that copies are not slowed down. On a GPU, those within its memory are
            then kernels, which wait for the matmul beside them.
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
    """A link on a GPU, for any streams.

    Args:
        device: the GPU.
        speed: the bytes that cross the link in a second; None: the link has no pace.

    Attributes:
        crossing: the ``_C.EmulatedLink``.
    """

    trial = 0.01  # so long that a microsecond or two for the start of each copy does not count
    _AHEAD = 20_000_000  # cycles, about 10 ms, in which the host may issue work
    _STAGING = 16 << 20  # bytes
    _TRIALS = 7
    _COPIES = 16  # in a trial
    _CORRECTIONS = 2

    def __init__(self, device: torch.device, speed: float | None) -> None:
        self._clock, self._times = (torch.zeros(size, dtype=torch.int64, device=device) for size in (1, 2))
        self._memory = (
            torch.zeros(self._STAGING, dtype=torch.uint8, pin_memory=True),
            torch.zeros(self._STAGING, dtype=torch.uint8, device=device),
        )
        torch.cuda.synchronize(device)  # all of it is zeroed on one stream, and used on others
        self.crossing = self._link(1.0, 1.0)
        self.crossing = self._link(*(0.0 if speed is None else self._share(speed, way) for way in (True, False)))

    def _link(self, from_host: float, to_host: float) -> _C.EmulatedLink:
        return _C.EmulatedLink(self._clock, *self._memory, from_host, to_host)

    def _share(self, speed: float, from_host: bool) -> float:
        """Return how many bytes to copy from or to the host for each byte that crosses the link."""
        share, nbytes = self._host_speed(from_host) / speed, round(speed * self.trial / self._COPIES)

        def trial(link: _C.EmulatedLink) -> None:
            for _ in range(self._COPIES):
                link.cross(nbytes, from_host)

        for _ in range(self._CORRECTIONS):  # the host's speed in long copies is not quite that in short ones
            share *= self.trial / max(1e-9, self._median(partial(trial, self._link(share, share))))
        return share

    def _host_speed(self, from_host: bool) -> float:
        """Return the bytes that are copied from or to the host in a second, without the time to start a copy.

        Raises:
            RuntimeError: the times are meaningless, because something else uses the GPU.
        """

        def spent(nbytes: int) -> float:
            return self._median(lambda: self.crossing.cross(nbytes, from_host))

        spent(self._STAGING)
        once, twice = spent(self._STAGING), spent(2 * self._STAGING)
        if twice <= once:
            raise RuntimeError(
                f"copies of {self._STAGING} bytes and of twice as many took {once:.2g} and {twice:.2g} s: an emulated "
                "link needs a GPU that nothing else uses"
            )
        return self._STAGING / (twice - once)

    def _median(self, work: Callable[[], object]) -> float:
        return statistics.median(self.seconds(work) for _ in range(self._TRIALS))

    def pace(self, ns: int) -> None:
        """See `Pacer.pace`."""
        _C.pace(self._clock, ns)

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Inside, copies across the link move their data, and take any time."""
        self.crossing.exact = True
        try:
            yield
        finally:
            self.crossing.exact = False

    def seconds(self, work: Callable[[], object]) -> float:
        """See `Pacer.seconds`."""
        torch.cuda._sleep(self._AHEAD)
        _C.stamp(self._times, 0)
        work()
        _C.stamp(self._times, 1)
        begin, end = self._times.tolist()
        return (end - begin) / 1e9


def across(link: Link, pacer: Pacer, target: Tensor, source: Tensor) -> None:
    """Copy in pieces of rows, with the pace of the link. One of the two tensors is a phantom's."""
    if link.bytes_per_second is None or not target.numel():
        target.copy_(source)
        return
    pacer.pace(0)
    rows = target.shape[0]
    for begin, count in pieces(rows, target.nbytes // rows):
        target[begin : begin + count].copy_(source[begin : begin + count])
        pacer.pace(link.nanoseconds(count * (target.nbytes // rows)))


class PacedProgram(_C.Program):
    """A program whose kernels that read the memory of phantoms have the pace of a link. The driver paces copies."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

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
