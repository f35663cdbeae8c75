"""A record has every action of a step, in order, with consistent times. A step without a record is not recorded."""

from __future__ import annotations

import itertools

import pytest

from symm_overlap.pipeline import Action, Schedule
from symm_overlap.pipeline.action import SEND_F
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.measured import TimedAction
from symm_overlap.pipeline.runtime import PipelineRuntime, Record, Stage
from tests.ranks import Pool, Rank

from .models import Layer, batch, squared


def recorded(me: Rank, schedule: Schedule, transport: str) -> tuple[tuple[Action, ...], list[list[TimedAction]]]:
    """Return this rank's row of the schedule, and the records of two steps. The step between them has no record."""
    stages = [Stage(Layer(index), index) for index in schedule.stages_of_ranks[me.rank]]
    runtime = PipelineRuntime(stages, schedule, group=me.group, loss=squared, transport=transport)
    x, target = batch(schedule.microbatches)
    noted = []
    for step in range(3):
        runtime.record = record = Record() if step != 1 else None
        runtime.step(x, target=target)
        if record is not None:
            noted.append(record.clear())
            assert record.ran == []
    row = tuple(leaf for action in runtime.schedule.rows[me.rank] if action for leaf in action.leaves)
    return row, noted


@pytest.mark.parametrize("transport", ["symmetric", "c10d"])
@pytest.mark.parametrize("name", ["1F1B", "ZBV", "DualPipeV"])
def test_every_action_is_noted_in_order(ranks: Pool, name: str, transport: str) -> None:
    schedule = generate(name, 2, 4)
    steps: list[list[list[TimedAction]]] = [[], []]
    for row, noted in ranks.run(2, recorded, schedule, transport):
        for step, ran in zip(steps, noted, strict=True):
            assert tuple(each.action for each in ran) == row
            assert all(each.start <= each.end for each in ran)
            assert all(before.end <= after.start for before, after in itertools.pairwise(ran))
            step.append(ran)
    for step in steps:
        times = {each.action: each for ran in step for each in ran}
        for action, send in times.items():
            if action.kind == SEND_F:  # the clock is the same on all ranks, so nothing arrives before it is sent
                assert times[Action(action.stage + 1, "RECV_F", action.microbatch)].end >= send.start
