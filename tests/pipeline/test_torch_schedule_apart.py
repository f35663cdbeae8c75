"""By torch's runtime and with a split backward, stages whose inputs require no gradient get all of their gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from symm_overlap.pipeline import torch_schedule
from symm_overlap.pipeline.generators import generate
from tests.pipeline.test_torch_schedule import WIDTH, batch, exact
from tests.ranks import Rank

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.12."), reason="torch 2.12 and its own schedules fail behind frozen stages"
)


def block(stage):
    """Return a block that uses each weight once: torch 2.11 computes wrong gradients of weights that are used twice."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stage)
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


class TwoValues(nn.Module):
    """Passes on two values. With a frozen branch, one of them requires no gradient."""

    def __init__(self, stage, last):
        super().__init__()
        self.main, self.side, self.last = block(stage), block(stage + 100), last

    def forward(self, x, y=None):
        main, side = self.main(x), self.side(x if y is None else y)
        return main + side if self.last else (main, side)


def frozen_stages(stages, frozen):
    """Return the blocks of all stages, of which some are frozen."""
    return [block(stage).requires_grad_(stage not in frozen) for stage in range(stages)]


def frozen_branches(stages, frozen):
    """Return stages with two branches. In some stages one branch is frozen."""
    made = [TwoValues(stage, stage == stages - 1) for stage in range(stages)]
    for stage in frozen:
        made[stage].side.requires_grad_(False)
    return made


def trains(me: Rank, name, make, kind):
    """Check all gradients of a step, twice, with those of the whole model. ``make(stages, kind)``: its stages."""
    schedule = generate(name, me.world, 2 * me.world)
    mine, whole = (make(schedule.stages, kind) for _ in range(2))
    stages = [
        PipelineStage(mine[index], index, schedule.stages, me.device, group=me.group)
        for index in schedule.stages_of_ranks[me.rank]
    ]
    runtime = torch_schedule(schedule, stages, nn.functional.mse_loss, split=True)
    x, target = batch(schedule.microbatches)
    for part, wanted in zip(x.chunk(schedule.microbatches), target.chunk(schedule.microbatches), strict=True):
        values = (part,)
        for module in whole:
            returned = module(*values)
            values = returned if isinstance(returned, tuple) else (returned,)
        (nn.functional.mse_loss(*values, wanted) / schedule.microbatches).backward()
    first, last = (schedule.rank_of(stage) == me.rank for stage in (0, schedule.stages - 1))
    for _ in range(2):
        runtime.step(*([x] if first else []), target=target if last else None)
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                exact(parameter.grad, whole[stage.stage_index].get_parameter(name).grad)
                parameter.grad = None
        assert not any(stage.backward_state for stage in stages)


@pytest.mark.parametrize(
    ("name", "frozen"),
    [("ZB-H1", (0,)), ("ZB-H1", (0, 1)), ("ZBV", (0,)), ("ZBV", (0, 1, 2)), ("DualPipeV", (0,))],
)
def test_stages_behind_frozen_ones_get_their_gradients(ranks, name, frozen):
    ranks.run(3 if name == "ZB-H1" else 2, trains, name, frozen_stages, frozen)


@pytest.mark.parametrize("name", ["ZB-H1", "ZBV"])
def test_an_output_that_depends_on_no_input_with_gradients_passes_its_own_on(ranks, name):
    ranks.run(3, trains, name, frozen_branches, (0,))
