"""Our schedules train right on the stages of a model that torch has traced and cut, one stage alone or a list."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

from symm_overlap.pipeline import torch_schedule
from symm_overlap.pipeline.generators import generate
from tests.pipeline.test_torch_schedule import Block, batch, exact, reference
from tests.ranks import Rank


def trains(me: Rank, name: str, listed: bool) -> None:
    """Compare a step on traced stages with the whole model. If ``listed`` is False, the stage is passed alone."""
    schedule = generate(name, me.world, 2 * me.world)
    losses, output, gradients = reference(schedule.stages, schedule.microbatches)
    model = nn.Sequential(*map(Block, range(schedule.stages)))
    x, target = batch(schedule.microbatches)
    cuts = {str(stage): SplitPoint.BEGINNING for stage in range(1, schedule.stages)}
    traced = pipeline(model, (x.chunk(schedule.microbatches)[0],), split_spec=cuts)
    stages = [traced.build_stage(index, me.device, me.group) for index in schedule.stages_of_ranks[me.rank]]
    runtime = torch_schedule(schedule, stages if listed else stages[0], nn.functional.mse_loss)
    first, last = (schedule.rank_of(stage) == me.rank for stage in (0, schedule.stages - 1))
    found: list[torch.Tensor] = []
    returned = runtime.step(*([x] if first else []), target=target if last else None, losses=found)
    for stage in stages:
        for parameter_name, parameter in stage.submod.named_parameters():
            exact(parameter.grad, gradients[parameter_name])
    if last:
        exact(returned, output)
        exact(found, losses)


@pytest.mark.parametrize(("name", "listed"), [("1F1B", False), ("ZB-H1", False), ("ZBV", True)])
def test_traced_stages_train_right(ranks, name, listed):
    ranks.run(2, trains, name, listed)
