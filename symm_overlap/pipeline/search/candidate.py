"""A schedule that a search looks at, and what the simulator says about it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain
from math import inf
from typing import NamedTuple

from ..activations import Activations, fits
from ..cost import simulate_cost
from ..cost_result import CostResult
from ..costs import PipelineCosts
from ..encoded import Encoded, encode, integers
from ..lowering import add_reduce_grad, add_send_recv, add_unshard_reshard, defer_receives
from ..lowering.unshard import WINDOW
from ..partition import Sizes
from ..schedule import Schedule

Rows = tuple[tuple[int, ...], ...]
"""For each rank the cells of `Encoded`."""


class Lowering(NamedTuple):
    """How messages and gathers are put into a schedule.

    Attributes:
        gathers: put UNSHARD, RESHARD and REDUCE_GRAD.
        lookahead: for each rank, how many stages it gathers ahead.
        deferred: receive as late as possible.
    """

    gathers: bool
    lookahead: tuple[int, ...]
    deferred: bool = False

    @staticmethod
    def of(costs: PipelineCosts, ranks: int) -> Lowering:
        """The usual one for these costs: with gathers where they take time."""
        times = [costs.unshard, costs.reduce_grad]
        gathers = any(any(time) if not isinstance(time, (int, float)) else time for time in times)
        return Lowering(bool(gathers), (WINDOW,) * ranks)

    def lower(self, schedule: Schedule) -> Schedule:
        """The schedule with all of it."""
        if self.gathers:
            schedule = add_reduce_grad(add_unshard_reshard(schedule, WINDOW, self.lookahead))
        lowered = add_send_recv(schedule)
        return defer_receives(lowered) if self.deferred else lowered


class Candidate(NamedTuple):
    """A schedule, the stages that it is for, and how it is lowered.

    Attributes:
        name: where it comes from.
        rows: the cells of its actions that compute, and empty ones where these place messages.
        frame: everything else of the schedule.
        activations: what its activations take.
        costs: those of its stages.
        sizes: for each stage of a pipeline, how many layers it has.
        lowering: how it is lowered.
    """

    name: str
    rows: Rows
    frame: Encoded
    costs: PipelineCosts
    sizes: Sizes
    lowering: Lowering
    activations: Activations

    @property
    def encoded(self) -> Encoded:
        """Its actions that compute."""
        starts = [0, *accumulate(map(len, self.rows))]
        return self.frame._replace(cells=integers([*chain(*self.rows)]), starts=integers(starts))

    def lowered(self) -> Encoded:
        """With its messages and gathers.

        Raises:
            ValueError: its actions cannot run in their order.
        """
        lowering = self.lowering
        if lowering.gathers or lowering.deferred:
            return encode(lowering.lower(self.encoded.schedule()))
        return self.encoded  # the simulator puts the messages, without making the actions

    def peak(self) -> float:
        """The most memory that the activations of a rank take."""
        return max(self.activations.peak(row, self.frame.parts) for row in self.rows)


def rounded(makespan: float) -> float:
    """A makespan without what rounding makes different in the last digits: sums of equal times have many orders."""
    return float(f"{makespan:.12g}")


class Measured(NamedTuple):
    """A candidate that was simulated."""

    candidate: Candidate
    result: CostResult
    peak: float

    @property
    def makespan(self) -> float:
        """How long a step takes."""
        return self.result.makespan

    @property
    def cost(self) -> tuple[float, float]:
        """What makes one better than another: its makespan, and then its peak."""
        return rounded(self.makespan), self.peak

    @property
    def bubble(self) -> float:
        """Which part of the time of all ranks they do not compute."""
        whole = self.makespan * self.result.encoded.ranks
        return sum(self.result.bubbles) / whole if whole else 0.0


class Budget:
    """Simulates candidates, as many as it has, and knows the best: the first of those with the least cost."""

    def __init__(self, steps: int, cap: float, progress: Callable[[int, int, float], None] | None = None) -> None:
        self.steps, self.cap = steps, cap
        self.used = 0
        self.best: Measured | None = None
        self._progress = progress

    @property
    def left(self) -> int:
        """How many more can be simulated."""
        return self.steps - self.used

    def measure(self, candidate: Candidate) -> Measured | None:
        """What the simulator says; None, at no price, where the candidate cannot run.

        Only what fits the cap becomes the best.
        """
        try:
            result = simulate_cost(candidate.lowered(), candidate.costs)
        except ValueError:  # the actions wait for each other in this order
            return None
        measured = Measured(candidate, result, candidate.peak())
        self.used += 1
        if fits(measured.peak, self.cap) and (self.best is None or measured.cost < self.best.cost):
            self.best = measured
        if self._progress:
            self._progress(self.used, self.steps, self.best.makespan if self.best else inf)
        return measured
