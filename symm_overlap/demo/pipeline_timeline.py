"""The measured timeline of a pipeline's last step, beside the timeline that the simulator predicts from earlier steps.

Every rank records when its actions ran. Before each measured step, the ranks meet at a barrier. The clocks of all ranks
therefore start at the same moment, even if the ranks are on several hosts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch.distributed as dist

from symm_overlap.demo.pipeline_trainer import PipelineTrainer
from symm_overlap.demo.rank import Rank
from symm_overlap.pipeline import Schedule, simulate_cost
from symm_overlap.pipeline.drawing import side_by_side, timeline_of, trace
from symm_overlap.pipeline.measured import Step, TimedAction, measured_costs, span
from symm_overlap.pipeline.runtime import Record
from symm_overlap.plan import draw

MEASURED = 20
"""The most steps that are measured."""

Noted = list[list[TimedAction]]
"""The actions that one rank ran, for each measured step."""


class Clock:
    """Records when the actions of a run's steps ran on this rank."""

    def __init__(self, trainer: PipelineTrainer, here: Rank, steps: int) -> None:
        self._trainer, self._here, self._steps = trainer, here, steps
        self._noted: Noted = []

    def wants(self, number: int) -> bool:
        """True if the step with this number, counted from 1, is measured.

        The last `MEASURED` steps are measured, but never the first step, which sets up.
        """
        return number > max(1, self._steps - MEASURED)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the step that runs in the body."""
        record = self._trainer.runtime.record = Record()
        dist.barrier()
        start = time.perf_counter()
        yield
        self._trainer.runtime.record = None
        self._noted.append(
            [TimedAction(ran.action, _ms(ran.start - start), _ms(ran.end - start)) for ran in record.ran]
        )

    def conclude(self, path: str) -> str | None:
        """On rank 0, write the trace and return a line that summarises it. Collective over all ranks."""
        gathered: list[Noted] | None = [[] for _ in range(self._here.world)] if self._here.rank == 0 else None
        dist.gather_object(self._noted, gathered)
        if gathered is None:
            return None
        schedule = self._trainer.runtime.schedule
        columns = self._here.world // schedule.ranks
        return _compared(schedule, [gathered[column::columns] for column in range(columns)], path)


def _compared(schedule: Schedule, columns: list[list[Noted]], path: str) -> str:
    """Write the trace of the last step beside the simulated step, and return how far the simulator is off.

    Args:
        columns: for each rank of a group that shares layers, what that rank's pipeline ran, by rank and then by step.
    """
    steps = [list(zip(*ranks, strict=True)) for ranks in columns]
    before: list[Step] = [step for column in steps for step in column[:-1]]
    last: list[Step] = [column[-1] for column in steps]
    predicted = simulate_cost(schedule, measured_costs(schedule, before))
    # The ranks that share layers wait for each other in every layer, so their pipelines take equally long.
    measured = span([rank for step in last for rank in step])
    begin = min(ran.start for step in last for rank in step for ran in rank)
    traces = {}
    for column, step in enumerate(last):
        rows = [[TimedAction(ran.action, ran.start - begin, ran.end - begin) for ran in rank] for rank in step]
        name = "measured" if len(last) == 1 else f"measured, {column + 1} of {len(last)}"
        traces[name] = draw.trace(timeline_of(schedule.placement, rows))
    traces["simulated"] = trace(predicted)
    Path(path).write_text(json.dumps(side_by_side(traces)))
    usual = median(span(step) for step in before)
    off, usually = predicted.makespan / measured - 1, predicted.makespan / usual - 1
    return (
        f"the pipeline took {measured:.2f} ms in the last step (median of the {len(steps[0]) - 1} before it: "
        f"{usual:.2f}); simulated with the costs of those: {predicted.makespan:.2f} ms, off by {off:+.1%} "
        f"({usually:+.1%} from the median)"
    )


def _ms(seconds: float) -> float:
    return seconds * 1e3
