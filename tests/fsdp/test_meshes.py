"""`shard_linears` and `fully_shard` in one model: all DTensors are on one mesh, in every form of the group."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from symm_overlap.fsdp import shard_linears
from symm_overlap.fsdp.layers.shards import mesh_of
from tests.ranks import Pool, Rank


def has_the_mesh_of_fully_shard(me: Rank) -> None:
    """A norm of all gradients needs one mesh for all, and torch tells meshes apart by the names of dimensions too."""
    mesh = DeviceMesh.from_group(me.group, "cpu", mesh_dim_names=("dp",))
    for group in (mesh, (mesh, "dp"), (mesh, 0)):
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)).double()
        assert shard_linears(model, group).sharded == ["0"]
        fully_shard(model, mesh=mesh, ignored_params=set(model[0].parameters()))
        model(torch.ones(3, 4, dtype=torch.float64)).square().sum().backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor() > 0
    unnamed = DeviceMesh.from_group(me.group, "cpu")
    assert mesh_of((unnamed, 0), torch.empty(0)) is unnamed
    square = DeviceMesh.from_group(
        [me.group, me.group], "cpu", mesh=torch.arange(me.world).view(1, -1), mesh_dim_names=("a", "b")
    )
    for dim in ("b", 1):
        assert mesh_of((square, dim), torch.empty(0)) == square["b"]
    with pytest.raises(ValueError, match="has no dimension 'c'"):
        mesh_of((square, "c"), torch.empty(0))


def test_a_dimension_of_a_mesh_is_the_mesh_of_fully_shard(ranks: Pool) -> None:
    ranks.run(2, has_the_mesh_of_fully_shard)
