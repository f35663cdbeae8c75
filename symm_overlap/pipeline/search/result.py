"""What a search found, beside what it started from."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..costs import PipelineCosts
from ..partition import Sizes
from ..schedule import Schedule
from .candidate import rounded
from .starts import Refused


@dataclass(frozen=True)
class Start:
    """One handcrafted schedule.

    Attributes:
        name: of its generator.
        stages_per_rank: how many stages each rank has.
        sizes: for each stage of a pipeline how many layers it has.
        makespan: how long a step takes.
        peak: the most memory that the activations of a rank take.
        bubble: which part of the time of all ranks they do not compute.
        fits: whether the peak is within the cap.
    """

    name: str
    stages_per_rank: int
    sizes: Sizes
    makespan: float
    peak: float
    bubble: float
    fits: bool


@dataclass(frozen=True)
class SearchResult:
    """The best schedule within the cap.

    Attributes:
        name: the generator, or the placement, that it comes from.
        schedule: its actions that compute.
        lowered: with its messages, and with its gathers where they take time.
        sizes: for each stage of a pipeline how many layers it has.
        costs: those of the stages.
        makespan, peak, bubble: see `Start`.
        memory_cap: what was given.
        starts: the handcrafted schedules that can be, the quickest first.
        refused: those that cannot be, and why.
        evaluated: how many schedules were simulated.
    """

    name: str
    schedule: Schedule
    lowered: Schedule
    sizes: Sizes
    costs: PipelineCosts
    makespan: float
    peak: float
    bubble: float
    memory_cap: float
    starts: tuple[Start, ...]
    refused: tuple[Refused, ...]
    evaluated: int

    @property
    def best_start(self) -> Start | None:
        """The quickest handcrafted schedule within the cap; None where none is."""
        within = (start for start in self.starts if start.fits)
        return min(within, key=lambda start: (rounded(start.makespan), start.peak), default=None)

    @property
    def gain(self) -> float | None:
        """How much shorter a step is than with `best_start`: 0.05 is 5 %; None without one."""
        best = self.best_start
        if best is None:
            return None
        return 1.0 - rounded(self.makespan) / rounded(best.makespan) if best.makespan else 0.0

    def __str__(self) -> str:
        """The table of starting points and the schedule that was found."""
        head = f"  {'schedule':24}{'stages a rank':>14}{'makespan':>12}{'peak':>10}{'bubble':>9}  within the cap"
        lines = [head]
        for start in self.starts:
            lines.append(
                f"  {start.name:24}{start.stages_per_rank:>14}{start.makespan:>12.6g}{start.peak:>10.4g}"
                f"{start.bubble:>8.1%}   {'yes' if start.fits else 'no'}"
            )
        lines += [f"  {each.name:24}{each.stages_per_rank:>14}  {each.why}" for each in self.refused]
        count = self.schedule.stages // self.schedule.ranks
        lines.append(
            f"  {'found':24}{count:>14}{self.makespan:>12.6g}{self.peak:>10.4g}{self.bubble:>8.1%}   yes"
            f"  (from {self.name}, {self.evaluated} schedules simulated)"
        )
        return "\n".join([*lines, "", self.verdict()])

    def verdict(self) -> str:
        """How the schedule compares with the best handcrafted one at the same cap."""
        cap = "without a cap" if self.memory_cap == inf else f"at the same cap of {self.memory_cap:g}"
        best = self.best_start
        if best is None:
            return f"no handcrafted schedule fits {cap.replace('at the same', 'the')}; this one does"
        what = f"the best handcrafted schedule {cap}, {best.name} with {best.stages_per_rank} a rank"
        if self.gain:
            return f"{self.gain:.1%} shorter than {what}"
        return f"as long as {what}: nothing better was found"
