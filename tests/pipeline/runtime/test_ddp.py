"""DDP with options inside a stage: unused parameters keep no gradient, and a static graph is rejected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from tests.ranks import Pool, Rank

MICROBATCHES = 3


class Routed(nn.Module):
    """Has three layers. Both ranks use the first, rank 0 alone uses the second, and nobody uses the third."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y + self.layers[1](x) if self.rank == 0 else y


def batch(rank: int) -> Tensor:
    return torch.randn(2 * MICROBATCHES, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.double)


def mean_square(output: Tensor, _target: Tensor) -> Tensor:
    return output.square().mean()


def routed(rank: int) -> Routed:
    torch.manual_seed(0)
    return Routed(rank).double()


def unused_have_no_gradient(me: Rank) -> None:
    module = DistributedDataParallel(routed(me.rank), process_group=me.group, find_unused_parameters=True)
    stage = Stage(module, 0)
    alone = me.groups[(me.rank,)]
    runtime = PipelineRuntime(stage, "GPipe", microbatches=MICROBATCHES, loss=mean_square, group=alone)
    for _ in range(2):
        module.zero_grad()
        runtime.step(batch(me.rank), target=batch(me.rank))
    whole = routed(0)
    for rank in range(me.world):
        whole.rank = rank
        (whole(batch(rank)).square().mean() / me.world).backward()
    found = [layer.weight.grad for layer in module.module.layers]
    torch.testing.assert_close(found, [layer.weight.grad for layer in whole.layers], rtol=1e-12, atol=1e-12)
    assert found[2] is None


def test_ddp_that_finds_unused_parameters_leaves_them_without_a_gradient(fresh_ranks: type[Pool]) -> None:
    fresh_ranks(2, groups=[(0,), (1,)]).run(2, unused_have_no_gradient)


def rejects_a_static_graph(me: Rank) -> None:
    module = DistributedDataParallel(routed(0), process_group=me.group, static_graph=True)
    alone = me.groups[(me.rank,)]
    runtime = PipelineRuntime(Stage(module, 0), "GPipe", microbatches=2, loss=mean_square, group=alone)
    with pytest.raises(ValueError, match="leave out static_graph=True"):
        runtime.step(batch(0)[:4], target=batch(0)[:4])


def test_ddp_with_a_static_graph_is_rejected(fresh_ranks: type[Pool]) -> None:
    fresh_ranks(2, groups=[(0,), (1,)]).run(2, rejects_a_static_graph)
