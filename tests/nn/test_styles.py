"""Parallel styles in eager mode: a parallelized model is the whole one, on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.nn.blocks import MLP, WIDTH, mlp_plan
from tests.nn.reference import WORLDS, equals_whole, values
from tests.ranks import Pool, Rank


def mlp(me: Rank, input: Placement, output: Placement, bias: bool) -> None:
    torch.manual_seed(0)

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(module, mesh, mlp_plan(input, output))

    equals_whole(me, MLP(bias).double(), parallelize, values((4, 8, WIDTH)), input, output)


LAYOUTS = [Replicate(), Shard(0), Shard(1), Shard(-1)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_column_and_row(ranks: Pool, world: int, bias: bool) -> None:
    for layout in LAYOUTS:
        ranks.run(world, mlp, layout, layout, bias)
    ranks.run(world, mlp, Shard(1), Replicate(), bias)
    ranks.run(world, mlp, Replicate(), Shard(0), bias)
