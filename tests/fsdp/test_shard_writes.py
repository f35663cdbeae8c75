"""Sharded weights that are written to before the backward pass, or that have another layout than they had."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from symm_overlap.fsdp import ShardedLinear
from tests.ranks import Pool, Rank


def written_before_backward(me: Rank) -> None:
    for shard_dim in (0, 1):
        layer = ShardedLinear.from_linear(nn.Linear(4, 6), me.group, shard_dim=shard_dim)
        loss = layer(torch.ones(2, 4, requires_grad=True)).sum()
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()
        layer(torch.ones(2, 4)).sum().backward()


def test_a_shard_that_is_written_to_before_the_backward_pass_is_an_error(ranks: Pool) -> None:
    ranks.run(2, written_before_backward)


def other_layouts(me: Rank) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(4, 6).double(), torch.ones(2, 4, dtype=torch.float64)
    mesh = DeviceMesh.from_group(me.group, "cpu")
    whole = {name: distribute_tensor(value, mesh, [Replicate()]) for name, value in plain.state_dict().items()}
    square = DeviceMesh.from_group(
        [me.group, me.group], "cpu", mesh=torch.arange(me.world).view(1, -1), mesh_dim_names=("a", "b")
    )
    for shard_dim in (0, 1):
        layer = ShardedLinear.from_linear(nn.Linear(4, 6).double(), me.group, shard_dim=shard_dim)
        layer.weight, layer.bias = (nn.Parameter(whole[name]) for name in ("weight", "bias"))
        torch.testing.assert_close(layer(x), plain(x))
        shard = DTensor.from_local(torch.ones(6, 4), square, [Replicate(), Replicate()], run_check=False)
        layer.weight = nn.Parameter(shard)
        with pytest.raises(ValueError, match="which has several dimensions: apply fully_shard to other modules"):
            layer(x)


def test_a_parameter_of_another_layout_is_laid_out(ranks: Pool) -> None:
    ranks.run(2, other_layouts)
