"""Parallel styles in eager mode: a parallelized model is the whole one, on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap.nn import ColwiseParallel, RowwiseParallel
from tests.nn.reference import WORLDS, equals_whole, values
from tests.ranks import Pool, Rank

WIDTH, HIDDEN = 8, 16


class MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias), nn.Linear(HIDDEN, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def mlp(me: Rank, input: Placement, output: Placement, bias: bool) -> None:
    torch.manual_seed(0)

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        plan = {"up": ColwiseParallel(input_layouts=input), "down": RowwiseParallel(output_layouts=output)}
        return parallelize_module(module, mesh, plan)

    equals_whole(me, MLP(bias).double(), parallelize, values((4, 8, WIDTH)), input, output)


LAYOUTS = [Replicate(), Shard(0), Shard(1), Shard(-1)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_column_and_row(ranks: Pool, world: int, bias: bool) -> None:
    for layout in LAYOUTS:
        ranks.run(world, mlp, layout, layout, bias)
    ranks.run(world, mlp, Shard(1), Replicate(), bias)
    ranks.run(world, mlp, Replicate(), Shard(0), bias)
