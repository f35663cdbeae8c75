"""Copies of the stages of a pipelined model, such as those of `torch.optim.swa_utils.AveragedModel`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.model import PipelineModel
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from tests.pipeline.model.models import make, mean_square
from tests.ranks import Pool, Rank


def copies_compute_by_themselves(me: Rank, trace: bool) -> None:
    """As those of `torch.optim.swa_utils.AveragedModel`."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    pipe = PipelineModel(model, num_microbatches=2, loss=mean_square, group=me.group, layer_names="*", trace=trace)
    x = torch.ones(4, 4).double()
    pipe.run_eval(input=x)
    copies = [copy.deepcopy(stage.module) for stage in pipe.stages]
    before = pipe.run_eval(input=x)
    for each in copies:
        for parameter in each.parameters():
            nn.init.ones_(parameter)
    stages = [Stage(each, stage.index) for each, stage in zip(copies, pipe.stages, strict=True)]
    found = PipelineRuntime(stages, "1F1B", microbatches=2, group=me.group).eval(**{"['input']": x})
    torch.testing.assert_close(pipe.run_eval(input=x), before, rtol=0, atol=0)
    if found is not None:
        expected = torch.full_like(found, 4 * (4 * (4 * 5 + 1) + 1) + 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("trace", [True, False])
def test_copies_of_stages_compute_with_their_own_parameters(ranks: Pool, trace: bool) -> None:
    ranks.run(2, copies_compute_by_themselves, trace)


def averaged(me: Rank) -> None:
    model, batch, options = make("shared", 4)
    schedule = generate("ZBVZeroBubble", 2, 4)
    pipe = PipelineModel(model, num_microbatches=4, schedule=schedule, group=me.group, **options).build(**batch)
    stages = [stage.module for stage in pipe.stages]
    copy.deepcopy(stages[0])
    with pytest.raises(ValueError, match=r"shares [\w.]+ with an earlier stage of its rank.* together"):
        torch.optim.swa_utils.AveragedModel(stages[1])
    together = nn.ModuleList(stages)
    average = torch.optim.swa_utils.AveragedModel(together)
    average.update_parameters(together)  # the first one copies
    copies: list[Any] = list(average.module)
    for each, stage in zip(copies, stages, strict=True):
        assert [name for name, _ in each.named_parameters()] == [name for name, _ in stage.named_parameters()]
        for name, value in stage.state_dict().items():
            torch.testing.assert_close(each.state_dict()[name], value, rtol=0, atol=0)


def test_stages_of_a_rank_that_share_a_parameter_are_averaged_together(ranks: Pool) -> None:
    """Their copies share it too. The later one cannot be copied without the earlier one."""
    ranks.run(2, averaged)
