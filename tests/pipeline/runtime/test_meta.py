"""Stages may be on the meta device when the runtime is created, and must have memory when they first run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import symm_overlap
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from tests.pipeline.runtime.models import Layer, assert_gradients, batch, gradients, reference, squared
from tests.pipeline.runtime.test_contract import TRANSPORTS
from tests.ranks import Pool, Rank

TIED = [[(0, "linear.bias"), (1, "linear.bias")]]


def on_meta(me: Rank, transport: str) -> tuple[nn.Module, PipelineRuntime]:
    """Return this rank's stage, on meta, and the runtime that was created with it."""
    module = Layer(me.rank).to("meta")
    runtime = PipelineRuntime(
        Stage(module, me.rank),
        generate("1F1B", ranks=me.world, microbatches=4),
        group=me.group,
        loss=squared,
        tied=TIED,
        transport=transport,
        device=me.device,
    )
    return module, runtime


def filled_later(me: Rank, transport: str) -> None:
    whole = [Layer(0), Layer(1)]
    module, runtime = on_meta(me, transport)
    module.to_empty(device=me.device)
    module.load_state_dict(whole[me.rank].state_dict())
    whole[1].linear.bias = whole[0].linear.bias
    for step in range(3):
        x, target = batch(4, step)
        wanted = reference(whole, x, target, 4)[2]
        runtime.step(x, target=target)
        assert_gradients(gradients(module), wanted[me.rank])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stages_may_get_memory_after_the_runtime_is_created(ranks: Pool, transport: str) -> None:
    ranks.run(2, filled_later, transport)


def never_filled(me: Rank, lane: int, transport: str) -> None:
    with symm_overlap.lane(lane), symm_overlap.timeout(20):
        module, runtime = on_meta(me, transport)
        if me.rank == 1:
            module.to_empty(device=me.device)
        x, target = batch(4)
        error = RuntimeError if me.rank == 0 else dist.DistBackendError
        for run in (runtime.eval, runtime.step):
            with pytest.raises(error, match=r"norm\.weight of stage 0 is on the device 'meta'"):
                run(x, target=target)
        if me.rank == 0:
            module.to_empty(device=me.device)
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        result = runtime.eval(x)
        assert result is None if me.rank == 0 else bool(torch.isfinite(result).all())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_without_memory_fails_on_every_rank(ranks: Pool, fresh_lane: Any, transport: str) -> None:
    ranks.run(2, never_filled, fresh_lane(), transport)
