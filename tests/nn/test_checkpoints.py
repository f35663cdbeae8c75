"""Checkpoints of weights with several outputs or inputs.

Full state dicts are right, and what torch would get wrong raises an error.
"""

from __future__ import annotations

import tempfile
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from symm_overlap.nn import ColumnParallelLinear, ColwiseParallel, RowParallelLinear, RowwiseParallel
from tests.nn.reference import mesh_of, needs_strided_shards
from tests.ranks import Pool, Rank

EVERYTHING = StateDictOptions(full_state_dict=True)


def whole(parts: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4 * parts), nn.Linear(4 * parts, 6))


def plan(parts: int) -> dict[str, ParallelStyle]:
    return {"0": ColwiseParallel(parts=parts), "1": RowwiseParallel(parts=parts)}


def stored_by_torch(me: Rank, folder: str) -> None:
    mesh = mesh_of(me)
    for parts in (1, 3):
        for styled in (True, False):
            model = whole(parts)
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            if styled:
                parallelize_module(model, mesh, plan(parts))
            else:
                model[0] = ColumnParallelLinear.from_linear(model[0], out_features=[4] * parts, mesh=mesh)
                model[1] = RowParallelLinear.from_linear(model[1], in_features=[4] * parts, mesh=mesh)
            plain = f"{folder}/plain {parts} {styled}"
            dcp.save(expected, checkpoint_id=plain, process_group=me.group)
            full = get_model_state_dict(model, options=EVERYTHING)
            torch.testing.assert_close(full, expected, rtol=0, atol=0)
            state_dict = model.state_dict()
            if parts == 1 or me.world == 1:
                dcp.save(state_dict, checkpoint_id=plain, process_group=me.group)
                dcp.load(state_dict, checkpoint_id=plain, process_group=me.group)
                continue
            for layer, store in product("01", (dcp.save, dcp.load)):
                strided = {name: value for name, value in state_dict.items() if name.startswith(layer)}
                text = rf"{layer}\.(weight|bias) has several outputs or inputs.*full_state_dict=True"
                with pytest.raises(BaseException, match=text):
                    store(strided, checkpoint_id=plain, process_group=me.group)


@needs_strided_shards
@pytest.mark.parametrize("world", [1, 2])
def test_shards_of_several_outputs_are_not_stored_as_blocks(ranks: Pool, world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(world, stored_by_torch, folder)


def sharded_twice(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize_module(whole(3), mesh["tp"], plan(3))
    fully_shard(model, mesh=mesh["dp"])
    for ask in (
        model.state_dict,
        lambda: get_model_state_dict(model, options=EVERYTHING),
        lambda: set_model_state_dict(model, whole(3).state_dict(), options=EVERYTHING),
    ):
        text = r"state dict: 0\.weight has several outputs or inputs .* FSDP2 shards it again"
        with pytest.raises(RuntimeError, match=text):
            ask()


def test_no_state_dict_has_what_torch_would_put_together_wrongly(fresh_ranks: Any) -> None:
    fresh_ranks(4).run(4, sharded_twice)
