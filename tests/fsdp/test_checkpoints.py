"""Sharded layers save and load ordinary checkpoints and sharded ones on disk, and load DTensors of any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from symm_overlap.fsdp import ShardedLinear, shard_linears
from tests.fsdp.parity import whole
from tests.ranks import Pool, Rank


def plain(seed: int) -> nn.Module:
    """Return an unsharded model. Three ranks share sizes 7 and 5 unevenly, and the last rank has no part of size 2."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2, bias=False))


def sharded(me: Rank, seed: int, shard_dim: int) -> nn.Module:
    model = plain(seed)
    shard_linears(model, me.group, shard_dim=shard_dim)
    return model


def holds(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = model.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(whole(found[name]), value), name


def ordinary(me: Rank) -> None:
    expected = plain(1).state_dict()
    everything = checkpoint.StateDictOptions(full_state_dict=True)
    mesh = DeviceMesh.from_group(me.group, "cpu")
    for shard_dim in (0, 1):
        model = sharded(me, 2, shard_dim)
        model.load_state_dict(expected)
        holds(model, expected)
        assert all(isinstance(model[index], ShardedLinear) for index in (0, 2))
        for placement in (Replicate(), Shard(1 - shard_dim), Shard(shard_dim)):
            given = {
                name: distribute_tensor(value, mesh, [placement]) if value.dim() == 2 else value
                for name, value in expected.items()
            }
            for assign in (False, True):
                model = sharded(me, 3, shard_dim)
                model.load_state_dict(given, assign=assign)
                holds(model, expected)
                assert model[0].weight.placements == (Shard(shard_dim),)
        model = sharded(me, 4, shard_dim)
        checkpoint.set_model_state_dict(model, dict(expected), options=everything)
        holds(model, expected)
        if me.world == 5:  # torch gathers in the group of all five ranks
            saved = checkpoint.get_model_state_dict(model, options=everything)
            torch.testing.assert_close(saved, dict(expected), rtol=0, atol=0)
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
            model.load_state_dict({**expected, "0.weight": torch.ones(7, 6)})
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({name: value for name, value in expected.items() if name != "0.bias"})
        holds(model, expected)


@pytest.mark.parametrize("world", [1, 3, 5])
def test_state_dicts_are_those_of_the_whole_layers(ranks: Pool, world: int) -> None:
    ranks.run(world, ordinary)


def trained(me: Rank, model: nn.Module) -> torch.optim.Optimizer:
    """Train a step whose gradients are the same on all ranks, so that unsharded parameters stay the same too."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    return optimizer


def saves(me: Rank, folder: Path, shard_dim: int | None) -> dict[str, Tensor]:
    """Train a step, save the model and the optimizer, and return their values. None trains the unsharded model."""
    model = plain(1) if shard_dim is None else sharded(me, 1, shard_dim)
    optimizer = trained(me, model)
    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, process_group=me.group)
    return {**values(model), **moments(optimizer, model)}


def loads(me: Rank, folder: Path, shard_dim: int | None) -> dict[str, Tensor]:
    model = plain(2) if shard_dim is None else sharded(me, 2, shard_dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder, process_group=me.group)
    checkpoint.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return {**values(model), **moments(optimizer, model)}


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    return {f"moment of {name}": whole(optimizer.state[each]["exp_avg"]) for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("saver", "loader"),
    [((3, 0), (2, 1)), ((2, 1), (3, 0)), ((3, 0), (1, None)), ((1, None), (3, 1))],
    ids=str,
)
def test_sharded_checkpoints_load_in_other_worlds_and_shardings(
    ranks: Pool, tmp_path: Path, saver: tuple[int, int | None], loader: tuple[int, int | None]
) -> None:
    expected = ranks.run(saver[0], saves, tmp_path, saver[1])[0]
    for found in ranks.run(loader[0], loads, tmp_path, loader[1]):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
