"""With every schedule, results, losses and gradients in float64 are those of the stages run one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from symm_overlap.pipeline.generators import GENERATORS, generate
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from tests.pipeline.runtime.models import Layer, assert_gradients, batch, reference, squared
from tests.quick import one_in
from tests.ranks import Pool, Rank

STEPS = 3  # the first over torch.distributed, then one for each half of symmetric memory


def trains(me: Rank, name: str, microbatches: int, transport: str | None) -> None:
    schedule = generate(name, ranks=me.world, microbatches=microbatches)
    each = schedule.stages // schedule.pipelines  # the copy of a stage in another pipeline is equal
    mine = {stage: Layer(stage % each) for stage in schedule.stages_of_ranks[me.rank]}
    runtime = PipelineRuntime(
        [Stage(module, index) for index, module in mine.items()],
        schedule,
        group=me.group,
        loss=squared,
        transport=transport,
    )
    whole = [Layer(stage) for stage in range(each)]
    for step in range(STEPS):
        x, target = batch(microbatches, step)
        expected, losses, wanted = reference(whole, x, target, microbatches)
        found: list[Tensor] = []
        result = runtime.step(x, target=target, losses=found)  # gradients accumulate over the steps
        parts = [
            microbatch
            for stage in mine
            if schedule.next_stage(stage) is None
            for microbatch in schedule.microbatches_of(stage)
        ]
        rows = torch.arange(x.shape[0]).tensor_split(microbatches)
        if parts:
            torch.testing.assert_close(result, torch.cat([expected[rows[part]] for part in parts]))
            assert not result.requires_grad  # a graph would keep alive what the stage saved
            torch.testing.assert_close(found, [losses[part] for part in parts])
        else:
            assert result is None
            assert found == []
        for stage, module in mine.items():
            assert_gradients({n: p.grad for n, p in module.named_parameters()}, wanted[stage % each])


@pytest.mark.parametrize("world", one_in(2, [4, 2]))
@pytest.mark.parametrize("name", GENERATORS)
def test_trains_like_the_model_in_one_piece(ranks: Pool, name: str, world: int) -> None:
    ranks.run(world, trains, name, 2 * world, None)


@pytest.mark.parametrize("name", ["1F1B", "LoopedBFS", "ZB-H2", "ZBVZeroBubble", "DualPipe"])
def test_trains_over_torch_distributed(ranks: Pool, name: str) -> None:
    ranks.run(2, trains, name, 4, "c10d")
