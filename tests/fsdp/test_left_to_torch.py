"""`apply` warns of modules that it leaves to torch, works with hybrid sharding, and keeps memory flat and frees it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import symm_overlap.fsdp
from symm_overlap import force_path
from symm_overlap.fsdp._torch import groups_of, state_of
from tests.fsdp.test_apply import turns
from tests.fsdp.test_slots import shared_memory
from tests.fsdp.trained import Block, blocks, loss_of, model, sharded, train, with_and_without
from tests.ranks import Pool, Rank


def warned(made: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        symm_overlap.fsdp.apply(made)
    return [str(each.message) for each in caught if "symm_overlap" in str(each.message)]


def alone(me: Rank) -> list[str]:
    made = sharded(me, model())
    found = warned(made)
    train(me, made, partial(loss_of, me))
    assert not turns(made)
    return found


def test_a_group_of_one_rank_is_left_to_torch(ranks: Pool) -> None:
    (found,) = ranks.run(1, alone)
    assert found == [
        "symm_overlap.fsdp.apply leaves FSDPSequential, 0, 1, 2, 3 to torch: its group has only one rank, so "
        "there is no communication"
    ]


class Complex(nn.Module):
    """A layer whose parameter is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.eye(8), torch.ones(8, 8)).to(torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


def complex_gradients(me: Rank) -> list[str]:
    found, trained = [], []
    for ours in (False, True):
        made = nn.Sequential(nn.Linear(8, 8).double(), Complex())
        for parameter in made[0].parameters():
            nn.init.constant_(parameter, 0.5)
        for layer in made:
            fully_shard(layer, mesh=DeviceMesh.from_group(me.group, "cpu"))
        found += warned(made) if ours else []
        made(torch.full((2, 8), 1.0 + me.rank, dtype=torch.float64)).sum().backward()
        trained.append([parameter.grad.full_tensor() for parameter in made.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(trained[1], trained[0])
    return found


def test_complex_gradients_are_left_to_torch(ranks: Pool) -> None:
    for found in ranks.run(2, complex_gradients):
        assert found == ["symm_overlap.fsdp.apply leaves 1 to torch: its gradients are reduced in torch.complex128"]


def forced(me: Rank) -> list[str]:
    made = sharded(me, model())
    with force_path("c10d"):
        found = warned(made)
    train(me, made, partial(loss_of, me), 1)
    assert not turns(made)
    return found


def test_a_forced_path_leaves_all_to_torch(ranks: Pool) -> None:
    for (message,) in ranks.run(2, forced):
        assert 'force_path("c10d")' in message


def several_groups(me: Rank) -> list[str]:
    made = sharded(me, model())
    state = blocks(made)[1]._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # in torch 2.11, a module has one group of parameters
        return []
    groups.append(groups[0])
    return warned(made)


def test_a_module_with_several_groups_of_parameters_is_left_to_torch(ranks: Pool) -> None:
    for found in ranks.run(2, several_groups):
        assert not found or "leaves 1 to torch: it has several groups of parameters" in found[0]


def wrong_arguments(me: Rank) -> None:
    with pytest.raises(ValueError, match="no module of the model is sharded"):
        symm_overlap.fsdp.apply(model())
    with pytest.raises(ValueError, match="slots is 1; allowed are 2 and more"):
        symm_overlap.fsdp.apply(sharded(me, model()), slots=1)


def test_wrong_arguments_are_refused(ranks: Pool) -> None:
    ranks.run(1, wrong_arguments)


SHARDS, REPLICAS = ((0, 1), (2, 3)), ((0, 2), (1, 3))


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Pool]:
    """Four ranks, as two replicas of two shards."""
    with Pool(4, groups=[*SHARDS, *REPLICAS]) as pool:
        yield pool


def hybrid(me: Rank) -> dict[str, int]:
    shards, replicas = (next(each for each in groups if me.rank in each) for groups in (SHARDS, REPLICAS))
    mesh = DeviceMesh.from_group(
        [me.groups[replicas], me.groups[shards]],
        "cpu",
        mesh=torch.tensor(SHARDS),
        mesh_dim_names=("replicas", "shards"),
    )
    return turns(with_and_without(me, lambda: sharded(me, model(), mesh), partial(loss_of, me)))


def test_hybrid_sharding_reduces_in_slots_and_leaves_the_all_reduce_to_torch(four_ranks: Pool) -> None:
    assert four_ranks.run(4, hybrid) == [{"FSDP all-gather": 4 * 9, "FSDP reduce-scatter": 4 * 5}] * 4


def made_once(me: Rank) -> None:
    """Train a model whose largest block is in the middle and that prefetches two blocks. Its slots must not change."""
    torch.manual_seed(0)
    made = sharded(me, nn.Sequential(Block(5), Block(9), Block(300), Block(7), Block(6)).double())
    each = blocks(made)
    for index, block in enumerate(each):
        block.set_modules_to_forward_prefetch(each[index + 1 : index + 3])
    symm_overlap.fsdp.apply(made)
    (params,) = groups_of(state_of(each[0]))
    memory = params._all_gather_comm._memory._found.values()
    sizes = [(slots.count, slots.nbytes) for slots in memory]
    assert [count for count, _ in sizes] == [4, 2]
    train(me, made, partial(loss_of, me), 2)
    assert [(slots.count, slots.nbytes) for slots in memory] == sizes


def test_slots_are_made_in_apply_and_not_in_a_step(ranks: Pool) -> None:
    ranks.run(2, made_once)


def flat(me: Rank) -> None:
    def wide() -> nn.Module:
        made = nn.Sequential(*(nn.Linear(700, 700, bias=False) for _ in range(3)))
        for layer in made:
            fully_shard(layer, mesh=DeviceMesh.from_group(me.group, "cpu"))
        fully_shard(made, mesh=DeviceMesh.from_group(me.group, "cpu"))
        symm_overlap.fsdp.apply(made)
        return made

    def step(made: nn.Module) -> None:
        made(torch.ones(1, 700)).sum().backward()

    def slots(made: nn.Module) -> list[tuple[int, int]]:
        (params,) = groups_of(state_of(made[0]))  # type: ignore[index]
        return [(each.count, each.nbytes) for each in params._all_gather_comm._memory._found.values()]

    gc.collect()
    before = shared_memory()
    made = wide()
    for _ in range(3):
        step(made)
    held, size = shared_memory(), slots(made)
    assert held > before + 3_000, "the slots are in shared memory"
    for _ in range(100):
        step(made)
    assert (shared_memory(), slots(made)) == (pytest.approx(held, abs=200), size)
    del made
    gc.collect()
    assert shared_memory() < before + 500
    assert not [each for each in gc.get_objects() if isinstance(each, FSDPModule) and each.weight.shape == (700, 700)]


@pytest.mark.slow
def test_memory_is_flat_over_a_hundred_steps_and_goes_with_the_model(ranks: Pool) -> None:
    ranks.run(2, flat)
