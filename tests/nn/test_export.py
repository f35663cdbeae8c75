"""torch.export keeps the forward pass of parallel models, and a warning says that it keeps no backward pass."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap.fsdp import ShardedLinear
from symm_overlap.nn import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.nn.blocks import MLP, WIDTH, mlp_plan
from tests.nn.reference import EXACT, TORCH, mesh_of, part, values
from tests.ranks import Pool, Rank

WARNING = "does not keep the backward passes of parallel layers"


def exported(me: Rank, dim: int | None) -> None:
    torch.manual_seed(0)
    whole = MLP().double()
    layout = Replicate() if dim is None else Shard(dim)
    model = parallelize_module(copy.deepcopy(whole), mesh_of(me), mlp_plan(layout, layout))
    x = values((2, 4, WIDTH))
    keeps_the_forward(model, part(me, x, layout), part(me, whole(x).detach(), layout))


def keeps_the_forward(model: nn.Module, x: torch.Tensor, expected: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match=WARNING):
        torch.export.export(model, (x,), strict=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", WARNING)
        program = torch.export.export(model, (x,), strict=False)
    torch.testing.assert_close(program.module()(x), expected, **EXACT)


@pytest.mark.parametrize("dim", [None, 1])
def test_an_exported_model_computes_the_same(ranks: Pool, dim: int | None) -> None:
    ranks.run(2, exported, dim)


STYLES = {
    "head": ColwiseParallel(output_layouts=Replicate()),
    "gathered head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    "whole rows": RowwiseParallel(input_layouts=Replicate()),
    "split": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
    "batch by sequence": PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Shard(1), use_local_output=True
    ),
    "sequence by features": ColwiseParallel(output_layouts=Shard(1)),
    "whole": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
}


def moved(me: Rank, name: str, strict: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH).double()
    module = parallelize_module(layer, mesh_of(me), STYLES[name])
    with torch.no_grad():
        x = values((2, 4, WIDTH))
        program = torch.export.export(module, (x,), strict=strict)
        torch.testing.assert_close(program.module()(x + 1), module(x + 1), **EXACT)


@pytest.mark.parametrize("name", STYLES)
def test_inputs_and_outputs_that_change_their_layout_are_exported(ranks: Pool, name: str) -> None:
    for strict in (False, True) if TORCH >= (2, 13) else (False,):
        ranks.run(2, moved, name, strict)


def exported_shards(me: Rank) -> None:
    torch.manual_seed(0)
    layer = ShardedLinear(WIDTH, WIDTH, group=mesh_of(me)).double()
    x = values((2, WIDTH))
    keeps_the_forward(layer, x, layer(x).detach())


def test_an_exported_sharded_layer_computes_the_same(ranks: Pool) -> None:
    ranks.run(2, exported_shards)
