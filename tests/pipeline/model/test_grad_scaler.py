"""With torch's ShardedGradScaler, all stages skip the same steps, and training is that of the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from symm_overlap.pipeline.model import PipelineModel
from tests.pipeline.model.models import make, mean_square
from tests.pipeline.model.reference import EXACT, whole_step
from tests.ranks import Pool, Rank


def trains_as_the_whole(me: Rank, odd: str) -> list[float]:
    """Compare four steps. In the third one, the gradient of the parameter ``odd`` is infinite."""
    model, batch, _ = make("mlp", 4)
    whole = copy.deepcopy(model)
    scaler = ShardedGradScaler("cpu", process_group=me.group, init_scale=8.0, growth_interval=1)
    scaler.scale(torch.zeros(()))
    of_whole = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    of_whole.scale(torch.zeros(()))
    pipe = PipelineModel(
        model,
        num_microbatches=4,
        partition="even",
        loss=lambda result, target: scaler.scale(mean_square(result, target)),
        group=me.group,
    ).build(**batch)
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, whole))
    scales = []
    for step in range(4):
        pipe.run_train(**batch)
        whole_step(whole, batch, {"loss": lambda result, target: of_whole.scale(mean_square(result, target))}, 4)
        if step == 2:
            for module in (pipe, whole):
                for name, parameter in module.named_parameters():
                    if name == odd:
                        parameter.grad.view(-1)[0] = torch.inf
        scaler.unscale_(mine)
        of_whole.unscale_(theirs)
        found = pipe.clip_grad_norm_(0.5)
        torch.testing.assert_close(found, nn.utils.clip_grad_norm_(whole.parameters(), 0.5), **EXACT)
        for one, optimizer in ((scaler, mine), (of_whole, theirs)):
            one.step(optimizer)
            one.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == of_whole.get_scale()
        scales.append(scaler.get_scale())
        for each, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter, whole.get_parameter(each), **EXACT)
    return scales


@pytest.mark.parametrize("odd", ["embed.weight", "head.weight"])
def test_all_stages_skip_the_same_steps(ranks: Pool, odd: str) -> None:
    assert ranks.run(2, trains_as_the_whole, odd) == [[16.0, 32.0, 16.0, 32.0]] * 2
