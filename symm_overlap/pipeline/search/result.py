"""The result of a search, and the schedules that it started from."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..partition import Sizes
from ..schedule import Schedule
from ..simulation.costs import PipelineCosts
from .candidate import rounded
from .starts import RejectedStart


@dataclass(frozen=True)
class Start:
    """One handcrafted schedule.

    Attributes:
        name: the name of its generator.
        stages_per_rank: how many stages each rank has.
        sizes: how many layers each stage of a pipeline has.
        makespan: how long a step takes.
        peak: the most memory that the activations of a rank use.
        bubble: the fraction of the time of all ranks in which they do not compute.
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
        name: the generator or the placement that it comes from.
        schedule: its computing actions.
        lowered: the schedule with its messages, and with its gathers if they take time.
        sizes: how many layers each stage of a pipeline has.
        costs: the costs of the stages.
        makespan, peak, bubble: see `Start`.
        memory_cap: the cap that was given.
        starts: the possible handcrafted schedules, the fastest first.
        rejected: the handcrafted schedules that are not possible, and why.
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
    rejected: tuple[RejectedStart, ...]
    evaluated: int

    @property
    def best_start(self) -> Start | None:
        """The fastest handcrafted schedule within the cap; None if there is none."""
        within = (start for start in self.starts if start.fits)
        return min(within, key=lambda start: (rounded(start.makespan), start.peak), default=None)

    @property
    def gain(self) -> float | None:
        """How much shorter a step is than with `best_start`: 0.05 is 5 %. None if there is no `best_start`."""
        best = self.best_start
        if best is None:
            return None
        return 1.0 - rounded(self.makespan) / rounded(best.makespan) if best.makespan else 0.0

    def __str__(self) -> str:
        """Return the table of starting points and the schedule that was found."""
        head = f"  {'schedule':24}{'stages a rank':>14}{'makespan':>12}{'peak':>10}{'bubble':>9}  within the cap"
        lines = [head]
        for start in self.starts:
            lines.append(
                f"  {start.name:24}{start.stages_per_rank:>14}{start.makespan:>12.6g}{start.peak:>10.4g}"
                f"{start.bubble:>8.1%}   {'yes' if start.fits else 'no'}"
            )
        lines += [f"  {each.name:24}{each.stages_per_rank:>14}  {each.why}" for each in self.rejected]
        count = self.schedule.stages // self.schedule.ranks
        lines.append(
            f"  {'found':24}{count:>14}{self.makespan:>12.6g}{self.peak:>10.4g}{self.bubble:>8.1%}   yes"
            f"  (from {self.name}, {self.evaluated} schedules simulated)"
        )
        return "\n".join([*lines, "", self.verdict()])

    def verdict(self) -> str:
        """Return a sentence that compares the schedule with the best handcrafted one at the same cap."""
        cap = "without a cap" if self.memory_cap == inf else f"at the same cap of {self.memory_cap:g}"
        best = self.best_start
        if best is None:
            return f"no handcrafted schedule fits {cap.replace('at the same', 'the')}; this one does"
        what = f"the best handcrafted schedule {cap}, {best.name} with {best.stages_per_rank} a rank"
        if self.gain:
            return f"{self.gain:.1%} shorter than {what}"
        return f"as long as {what}: nothing better was found"
