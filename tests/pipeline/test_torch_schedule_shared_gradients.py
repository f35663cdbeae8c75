"""By torch's runtime and with a split backward, parameters whose gradients are one tensor get their own gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from symm_overlap.pipeline import torch_schedule
from symm_overlap.pipeline.generators import generate
from tests.pipeline.test_torch_schedule import WIDTH, batch, exact
from tests.ranks import Rank


class Added(nn.Module):
    """Adds two parameters of the shape of its input, which have the same gradient.

    With ``expanded``, it has another parameter, whose gradient is an expanded tensor.
    """

    def __init__(self, stage, rows, expanded):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stage)
            self.linear = nn.Linear(WIDTH, WIDTH).double()
            self.one, self.other = (nn.Parameter(torch.randn(rows, WIDTH, dtype=torch.float64)) for _ in range(2))
            self.factors = nn.Parameter(torch.randn(3, dtype=torch.float64)) if expanded else None

    def forward(self, x):
        factor = 1 if self.factors is None else self.factors.sum()
        return torch.tanh(self.linear(x)) * factor + self.one + self.other


def trains(me: Rank, name, expanded):
    """Check all gradients of a step, twice, with those of the whole model."""
    schedule = generate(name, me.world, 2 * me.world)
    x, target = batch(schedule.microbatches)
    rows = len(x) // schedule.microbatches
    mine, whole = ([Added(stage, rows, expanded) for stage in range(schedule.stages)] for _ in range(2))
    stages = [
        PipelineStage(mine[index], index, schedule.stages, me.device, group=me.group)
        for index in schedule.stages_of_ranks[me.rank]
    ]
    runtime = torch_schedule(schedule, stages, nn.functional.mse_loss, split=True)
    for part, wanted in zip(x.chunk(schedule.microbatches), target.chunk(schedule.microbatches), strict=True):
        (nn.functional.mse_loss(nn.Sequential(*whole)(part), wanted) / schedule.microbatches).backward()
    first, last = (schedule.rank_of(stage) == me.rank for stage in (0, schedule.stages - 1))
    for _ in range(2):
        runtime.step(*([x] if first else []), target=target if last else None)
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                exact(parameter.grad, whole[stage.stage_index].get_parameter(name).grad)
                parameter.grad = None


@pytest.mark.parametrize("name", ["ZB-H1", "ZBV"])
@pytest.mark.parametrize("expanded", [False, True])
def test_parameters_whose_gradients_are_one_tensor(ranks, name, expanded):
    ranks.run(2, trains, name, expanded)
