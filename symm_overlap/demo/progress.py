"""The output of a training run: a progress bar on a terminal, a table of steps, and a summary."""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

BAR_WIDTH = 24


@dataclass
class Curve:
    """The loss (nats a byte) and time (seconds) of each step of one model, and its peak memory (bytes) if known."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int | None = None

    def last_losses(self) -> tuple[float, int]:
        """Return the mean loss over the last tenth of the steps, and the number of these steps.

        The loss of a single step depends on its windows, so a mean says more.
        """
        count = max(1, len(self.losses) // 10)
        return statistics.fmean(self.losses[-count:]), count

    def median_seconds(self) -> float:
        """Return the median time of a step. The first step, which includes set-up, is left out if there are others."""
        return statistics.median(self.seconds[1:] or self.seconds)


@dataclass(frozen=True)
class Agreement:
    """How far two loss curves are apart.

    ``largest`` is the largest relative difference, and ``first_bad_step`` the first step that is past ``allowed``.
    """

    largest: float
    largest_step: int
    allowed: float
    first_bad_step: int | None

    @property
    def ok(self) -> bool:
        return self.first_bad_step is None

    def __str__(self) -> str:
        largest = (
            f"largest relative difference {self.largest:.1e} at step {self.largest_step}; allowed {self.allowed:g}"
        )
        if self.ok:
            return f"losses agree at every step ({largest})"
        return f"LOSSES DISAGREE from step {self.first_bad_step} on ({largest})"


def agreement(first: list[float], second: list[float], allowed: float) -> Agreement:
    """Compare two loss curves step by step, relative to the second. Steps count from 1.

    A NaN never agrees. A loss of 0, which a text of equal bytes reaches, agrees with 0 alone.
    """
    pairs = zip(first, second, strict=True)
    differences = [abs(a - b) / abs(b) if b else (math.inf if a else 0.0) for a, b in pairs]
    differences = [math.inf if math.isnan(d) else d for d in differences]
    bad = [step for step, d in enumerate(differences, 1) if d > allowed]
    worst = max(range(len(differences)), key=differences.__getitem__)
    return Agreement(differences[worst], worst + 1, allowed, bad[0] if bad else None)


class Report:
    """Writes the table of steps to ``out`` and, if ``bar`` is a terminal, a progress bar to ``bar``.

    The table has about ten rows for any number of steps. A row holds the losses and times of all curves, and the tokens
    (bytes) per second of the first curve.
    """

    def __init__(
        self, curves: list[Curve], steps: int, tokens: int, out: TextIO | None = None, bar: TextIO | None = None
    ) -> None:
        self._curves = curves
        self._steps = steps
        self._tokens = tokens  # bytes trained on in a step
        self._every = max(1, steps // 10)
        self._out = out or sys.stdout
        self._bar = bar or sys.stderr
        self._show_bar = self._bar.isatty()
        self._start = time.perf_counter()

    def header(self) -> None:
        """Write the header of the table."""
        cells = ["step", *(f"{c.name} loss" for c in self._curves), *(f"{c.name} ms" for c in self._curves)]
        self._line([*cells, "tokens/s"])

    def step(self, number: int) -> None:
        """Show step ``number``, counted from 1. It must be the last step in every curve."""
        if number == 1 or number % self._every == 0 or number == self._steps:
            cells = [str(number), *(f"{c.losses[-1]:.5f}" for c in self._curves)]
            cells += [f"{c.seconds[-1] * 1e3:.1f}" for c in self._curves]
            self._line([*cells, f"{self._tokens / self._curves[0].seconds[-1]:.0f}"])
        if self._show_bar:
            done = number * BAR_WIDTH // self._steps
            left = (time.perf_counter() - self._start) / number * (self._steps - number)
            speed = self._tokens / self._curves[0].seconds[-1]
            self._bar.write(
                f"\r[{'#' * done}{'.' * (BAR_WIDTH - done)}] {number}/{self._steps}  "
                f"loss {self._curves[0].losses[-1]:.3f}  {speed:.0f} tokens/s  {left:.0f} s left\x1b[K"
            )
            if number == self._steps:
                self._bar.write("\r\x1b[K")
            self._bar.flush()

    def summary(self) -> None:
        for c in self._curves:
            median = c.median_seconds()
            last, count = c.last_losses()
            over = f" (mean of the last {count} steps)" if count > 1 else ""
            self._out.write(
                f"{c.name}: loss {c.losses[0]:.3f} -> {last:.3f} nats a byte{over}, "
                f"median step {median * 1e3:.1f} ms, {self._tokens / median:.0f} tokens/s"
                f"{'' if c.peak is None else f', peak memory {c.peak / 2**20:.1f} MiB a rank'}\n"
            )
        ours, *others = self._curves
        for other in others:
            ratio = ours.median_seconds() / other.median_seconds()
            self._out.write(f"step time: {ours.name} takes {ratio:.2f} x that of {other.name}\n")
        self._out.flush()

    def _line(self, cells: list[str]) -> None:
        if self._show_bar:
            self._bar.write("\r\x1b[K")
            self._bar.flush()
        width = max(13, *(len(c.name) + 9 for c in self._curves))
        self._out.write(cells[0].rjust(6) + "".join(f"  {cell:>{width}}" for cell in cells[1:]) + "\n")
        self._out.flush()
