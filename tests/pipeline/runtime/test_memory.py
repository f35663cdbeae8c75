"""A step keeps at most as many microbatches alive as the verifier counts, and nothing after the step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline import verify
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from tests.pipeline.runtime.models import Layer, batch, squared
from tests.quick import one_in
from tests.ranks import Pool, Rank


class Token:
    """An object that supports weak references. The nodes of autograd's graphs do not."""


class Marked(torch.autograd.Function):
    """The identity, whose node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Watched(nn.Module):
    """A layer that counts how many graphs of forwards are alive on this rank."""

    def __init__(self, stage: int, alive: weakref.WeakSet[Token], counts: list[int]) -> None:
        super().__init__()
        self.layer, self.alive, self.counts = Layer(stage), alive, counts

    def forward(self, x: Tensor) -> Tensor:
        token = Token()
        self.alive.add(token)
        out: Tensor = Marked.apply(self.layer(x), token)
        self.counts.append(len(self.alive))
        return out


def keeps(me: Rank, name: str, transport: str) -> tuple[int, int]:
    schedule = generate(name, ranks=me.world, microbatches=8)
    alive: weakref.WeakSet[Token] = weakref.WeakSet()
    counts: list[int] = []
    stages = [Stage(Watched(stage, alive, counts), stage) for stage in schedule.stages_of_ranks[me.rank]]
    runtime = PipelineRuntime(stages, schedule, group=me.group, loss=squared, transport=transport)
    x, target = batch(8)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            losses: list[Tensor] = []
            runtime.step(x, target=target, losses=losses, return_outputs=False)
            assert len(alive) == 0, "nothing may be left for the garbage collector"
            runtime.eval(x, target=target)
            assert len(alive) == 0
    finally:
        gc.enable()
    return max(counts), verify(schedule).peak_activations[me.rank]


@pytest.mark.parametrize("transport", one_in(2, ["symmetric", "c10d"]))
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipeV"])
def test_a_rank_keeps_as_many_microbatches_as_the_verifier_says(ranks: Pool, name: str, transport: str) -> None:
    for counted, proven in ranks.run(3, keeps, name, transport):
        assert counted <= proven
        assert counted == proven or name not in ("GPipe", "1F1B")
