"""A transformer block with our styles: its results, the number of exchanges, copies of it, and its training."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap.nn import PrepareModuleInput
from tests.nn.blocks import WIDTH, Block, block_plan
from tests.nn.reference import WORLDS, equals_whole, mesh_of, values
from tests.ranks import Pool, Rank
from tests.transforms import choices


def alone(dim: int) -> dict[str, Any]:
    """Return a plan in which the whole input is gathered first, and every linear layer computes its own product."""
    gathered = PrepareModuleInput(
        input_layouts=Shard(dim), desired_input_layouts=Replicate(), use_local_output=True, linears=()
    )
    return {**block_plan(dim), "attention": gathered, "ffn": gathered}


def block(me: Rank, plan: dict[str, Any], dim: int | None) -> list[str]:
    torch.manual_seed(0)
    layout = Replicate() if dim is None else Shard(dim)

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(module, mesh, plan)

    with choices() as calls:
        equals_whole(me, Block().double(), parallelize, values((4, 8, WIDTH)), layout, layout, times=1)
    return [op for op, _ in calls]


@pytest.mark.parametrize("world", WORLDS)
def test_a_block_has_one_exchange_for_q_k_and_v_and_one_for_gate_and_up(ranks: Pool, world: int) -> None:
    shared, single = (counted(ranks.run(world, block, plan, 1)[0]) for plan in (block_plan(1), alone(1)))
    # Forward: column-parallel layers gather, and row-parallel layers scatter. Backward: column-parallel layers scatter
    # and gather again, and row-parallel layers gather.
    assert shared == {"all_gather_matmul": 2 + 2 + 2, "matmul_reduce_scatter": 2 + 2}
    assert single == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2, "matmul_all_reduce": 5}
    replicated = counted(ranks.run(world, block, block_plan(None), None)[0])
    assert replicated == {"matmul_all_reduce": 2 + 2}


def counted(calls: list[str]) -> dict[str, int]:
    """Return how often each op with a matmul is called."""
    return {op: calls.count(op) for op in sorted(set(calls)) if "matmul" in op}


@pytest.mark.parametrize("local", [True, False], ids=["local", "DTensors"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_block_that_is_sharded_along_the_batch_or_the_sequence(ranks: Pool, dim: int, local: bool) -> None:
    for world in WORLDS:
        ranks.run(world, block, block_plan(dim, local), dim)


def copied(me: Rank) -> None:
    torch.manual_seed(0)
    model = parallelize_module(Block().double(), mesh_of(me), block_plan(1))
    other = copy.deepcopy(model)
    x = values((2, 4, WIDTH))
    before = model(x)
    with torch.no_grad():
        for parameter in other.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().zero_()
    assert torch.equal(model(x), before)
    assert torch.equal(other(x), x)


def test_a_copy_of_a_model_has_parameters_of_its_own(ranks: Pool) -> None:
    ranks.run(2, copied)


def gradients_copied(me: Rank) -> None:
    model = parallelize_module(Block().double(), mesh_of(me), block_plan(1))
    model(values((2, 4, WIDTH))).square().sum().backward()
    for parameter, other in zip(model.parameters(), copy.deepcopy(model).parameters(), strict=True):
        for gradient in (copy.deepcopy(parameter.grad), saved(parameter.grad)):
            assert torch.equal(gradient.to_local(), parameter.grad.to_local())
        assert torch.equal(other.to_local(), parameter.to_local())
    with pytest.raises(TypeError, match=r"cannot be saved as a whole: save its state_dict\(\)"):
        saved(model)
    for name, local in saved({name: each.to_local() for name, each in model.state_dict().items()}).items():
        assert torch.equal(local, model.get_parameter(name).to_local())


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_model_with_gradients_is_copied_and_its_tensors_are_saved(ranks: Pool) -> None:
    ranks.run(2, gradients_copied)


def trained(me: Rank) -> None:
    """Ten steps of AdamW with clipped gradients lead to the same output as for the whole model."""
    torch.manual_seed(0)
    whole = Block().double()
    model = parallelize_module(copy.deepcopy(whole), mesh_of(me), block_plan(1))
    x = values((2, 4, WIDTH))
    shard = x.chunk(me.world, 1)[me.rank]
    for module, part in ((whole, x), (model, shard)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for _ in range(10):
            optimizer.zero_grad()
            module(part).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    torch.testing.assert_close(model(shard), whole(x).chunk(me.world, 1)[me.rank], rtol=1e-10, atol=1e-10)


def test_training_ends_where_that_of_the_whole_model_ends(ranks: Pool) -> None:
    for world in WORLDS:
        ranks.run(world, trained)
