"""Row-parallel layers whose input is made of several inputs, of which each is sharded: concatenated outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap.nn import ColumnParallelLinear, ColwiseParallel, RowParallelLinear, RowwiseParallel
from symm_overlap.nn._torch import strided_shard
from tests.nn.reference import EXACT, WORLDS, equals_whole, full, mesh_of, needs_strided_shards, values
from tests.ranks import Pool, Rank

WIDTH, EACH = 8, 12


class Parallel(nn.Module):
    """Two branches beside each other, one of them twice as wide as the other. One layer multiplies both results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, EACH), nn.Linear(WIDTH, 2 * EACH, bias=False)
        self.out: nn.Module = nn.Linear(3 * EACH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b = self.b(x)
        wide = b if isinstance(b, Tensor) else torch.cat(b, -1)
        return self.out(torch.cat([torch.tanh(self.a(x)), wide.square()], -1))


def styled(me: Rank, input: Placement, output: Placement) -> None:
    torch.manual_seed(0)

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        plan = {
            "a": ColwiseParallel(input_layouts=input),
            "b": ColwiseParallel(input_layouts=input, parts=2),
            "out": RowwiseParallel(output_layouts=output, parts=3),
        }
        return parallelize_module(module, mesh, plan)

    equals_whole(me, Parallel().double(), parallelize, values((4, 8, WIDTH)), input, output)


@needs_strided_shards
@pytest.mark.parametrize("world", WORLDS)
def test_branches_that_are_concatenated(ranks: Pool, world: int) -> None:
    for layout in (Replicate(), Shard(1), Shard(0)):
        ranks.run(world, styled, layout, layout)


def modules(me: Rank, dim: int | None) -> None:
    torch.manual_seed(0)

    def parallelize(module: Any, mesh: DeviceMesh) -> nn.Module:
        how = {"mesh": mesh, "sequence_dim": dim}
        module.a = ColumnParallelLinear.from_linear(module.a, **how)
        module.b = ColumnParallelLinear.from_linear(module.b, out_features=[EACH] * 2, **how)
        module.out = RowParallelLinear.from_linear(module.out, in_features=[EACH] * 3, **how)
        return module

    layout = Replicate() if dim is None else Shard(dim)
    equals_whole(me, Parallel().double(), parallelize, values((4, 8, WIDTH)), layout, layout)
    new = RowParallelLinear([EACH] * 3, WIDTH, mesh=mesh_of(me), dtype=torch.float64)
    assert tuple(new.weight.shape) == (WIDTH, 3 * EACH)
    assert new.parallel.parts == 3


@needs_strided_shards
@pytest.mark.parametrize("world", WORLDS)
def test_layers_made_from_linear_layers(ranks: Pool, world: int) -> None:
    for dim in (None, 1):
        ranks.run(world, modules, dim)


def given(me: Rank) -> None:
    """Pass the same input in every layout in which it can be given."""
    torch.manual_seed(0)
    mesh, whole = mesh_of(me), nn.Linear(3 * EACH, WIDTH).double()
    x = values((4, 3 * EACH))
    parts = torch.cat([part.chunk(me.world, -1)[me.rank] for part in x.chunk(3, -1)], -1)
    inputs: list[tuple[Placement, Tensor]] = [
        (Shard(-1), parts),
        (Shard(1), parts),
        (Replicate(), x),
        (Shard(0), x.chunk(me.world)[me.rank]),
        (Shard(-1), distribute_tensor(x, mesh, [Shard(1)])),
        (Shard(-1), distribute_tensor(x, mesh, [Replicate()])),
        (Shard(-1), DTensor.from_local(parts, mesh, [strided_shard(1, 3)], run_check=False)),
    ]
    for output in (Replicate(), Partial(), Shard(0)):
        for layout, tensor in inputs:
            how = RowwiseParallel(parts=3, input_layouts=layout, output_layouts=output, use_local_output=False)
            layer = parallelize_module(nn.Linear(3 * EACH, WIDTH).double(), mesh, how)
            layer.load_state_dict(
                {
                    name: distribute_tensor(value, mesh, [getattr(layer, name).placements[0]])
                    for name, value in whole.state_dict().items()
                }
            )
            torch.testing.assert_close(full(layer(tensor)), whole(x), **EXACT)


@needs_strided_shards
@pytest.mark.parametrize("world", WORLDS)
def test_inputs_of_every_layout(ranks: Pool, world: int) -> None:
    ranks.run(world, given)
