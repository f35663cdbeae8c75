"""A schedule that a search examines, and the result of simulating it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain
from math import inf
from typing import NamedTuple

from ...plan.work import integers
from ..lowering import add_reduce_grad, add_send_recv, add_unshard_reshard, defer_receives
from ..lowering.unshard import WINDOW
from ..partition import Sizes
from ..schedule import Schedule
from ..simulation.activations import Activations, fits
from ..simulation.cost import simulate_cost
from ..simulation.cost_result import CostResult
from ..simulation.costs import PipelineCosts
from ..simulation.encoded import Encoded, encode

Rows = tuple[tuple[int, ...], ...]
"""For each rank, its cells as in `Encoded`."""


class Lowering(NamedTuple):
    """How messages and gathers are inserted into a schedule.

    Attributes:
        gathers: whether to insert UNSHARD, RESHARD and REDUCE_GRAD.
        lookahead: for each rank, how many stages it gathers ahead.
        deferred: whether to receive as late as possible.
    """

    gathers: bool
    lookahead: tuple[int, ...]
    deferred: bool = False

    @staticmethod
    def of(costs: PipelineCosts, ranks: int) -> Lowering:
        """Return the default lowering for these costs: with gathers if they take time."""
        times = [costs.unshard, costs.reduce_grad]
        gathers = any(any(time) if not isinstance(time, (int, float)) else time for time in times)
        return Lowering(bool(gathers), (WINDOW,) * ranks)

    def lower(self, schedule: Schedule) -> Schedule:
        """Return the lowered schedule."""
        if self.gathers:
            schedule = add_reduce_grad(add_unshard_reshard(schedule, WINDOW, self.lookahead))
        lowered = add_send_recv(schedule)
        return defer_receives(lowered) if self.deferred else lowered


class Candidate(NamedTuple):
    """A schedule, the stages that it is for, and how it is lowered.

    Attributes:
        name: where it comes from.
        rows: the cells of its computing actions, and empty cells if they affect where messages are placed.
        frame: everything else of the schedule.
        activations: the memory of its activations.
        costs: the costs of its stages.
        sizes: how many layers each stage of a pipeline has.
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
        """The schedule of its computing actions."""
        starts = [0, *accumulate(map(len, self.rows))]
        return self.frame._replace(cells=integers([*chain(*self.rows)]), starts=integers(starts))

    def lowered(self) -> Encoded:
        """Return the schedule with its messages and gathers.

        Raises:
            ValueError: its actions cannot run in their order.
        """
        lowering = self.lowering
        if lowering.gathers or lowering.deferred:
            return encode(lowering.lower(self.encoded.schedule()))
        return self.encoded  # the simulator inserts the messages, without creating action objects

    def peak(self) -> float:
        """Return the most memory that the activations of a rank use."""
        return max(self.activations.peak(row, self.frame.parts) for row in self.rows)


def rounded(makespan: float) -> float:
    """Round a makespan to 12 digits: sums of the same times in different orders differ in the last digits."""
    return float(f"{makespan:.12g}")


class Measured(NamedTuple):
    """A candidate that has been simulated."""

    candidate: Candidate
    result: CostResult
    peak: float

    @property
    def makespan(self) -> float:
        """How long a step takes."""
        return self.result.makespan

    @property
    def cost(self) -> tuple[float, float]:
        """The key by which candidates are compared: the makespan, then the peak."""
        return rounded(self.makespan), self.peak

    @property
    def bubble(self) -> float:
        """The fraction of the time of all ranks in which they do not compute."""
        whole = self.makespan * self.result.encoded.ranks
        return sum(self.result.bubbles) / whole if whole else 0.0


class Budget:
    """Simulates a limited number of candidates, and remembers the best: the first of those with the least cost."""

    def __init__(self, steps: int, cap: float, progress: Callable[[int, int, float], None] | None = None) -> None:
        self.steps, self.cap = steps, cap
        self.used = 0
        self.best: Measured | None = None
        self._progress = progress

    @property
    def left(self) -> int:
        """How many more candidates can be simulated."""
        return self.steps - self.used

    def measure(self, candidate: Candidate) -> Measured | None:
        """Simulate a candidate. Return None, without counting it, if the candidate cannot run.

        Only a candidate that fits the cap can become the best.
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
