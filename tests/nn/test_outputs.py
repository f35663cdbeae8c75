"""``PrepareModuleOutput``: every layout means the same as in torch's style, and a sum of branches is reduced once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, parallel
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap import nn as ours
from tests.nn.reference import EXACT, equals_whole, local_of, mesh_of, values, weighted
from tests.quick import one_in
from tests.ranks import Pool, Rank

WIDTH = 8
LAYOUTS = [Replicate(), Shard(0), Shard(1), Shard(-1), Partial(), Partial("max")]


class Twice(nn.Module):
    """Returns two outputs. The second has no layout."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x


def as_in_torch(me: Rank, given: Placement, wanted: Placement, local: bool, as_dtensor: bool, length: int) -> None:
    mesh, mine = mesh_of(me), values((2, length, WIDTH), me.rank if isinstance(given, Partial | Shard) else 9)
    found: list[Any] = []
    for styles in (parallel, ours):
        style = styles.PrepareModuleOutput(
            output_layouts=(given, None), desired_output_layouts=(wanted, None), use_local_output=local
        )
        module, leaf = parallelize_module(Twice(), mesh, style), mine.clone().requires_grad_()
        x = DTensor.from_local(leaf, mesh, [given], run_check=False) if as_dtensor else leaf
        y, same = module(x)
        assert same is x
        assert isinstance(y, DTensor) is not local
        with torch.no_grad():
            without = local_of(module(x)[0])
        gradient: Any = None
        if "max" not in str(given):  # which has no gradient
            weighted(local_of(y), values(tuple(local_of(y).shape), 4)).backward()
            gradient = leaf.grad
        placements = y.placements if isinstance(y, DTensor) else None
        found.append((placements, local_of(y).detach(), without, gradient, without.is_contiguous()))
    assert found[1][0] == found[0][0]
    torch.testing.assert_close(found[1][1:4], found[0][1:4], **EXACT)
    assert found[1][4] or not found[0][4]


@pytest.mark.parametrize("as_dtensor", [False, True], ids=["tensor", "DTensor"])
def test_every_layout_is_that_of_torch(ranks: Pool, as_dtensor: bool) -> None:
    for given in LAYOUTS:
        for wanted in LAYOUTS[:-2]:
            for local in (True, False):
                ranks.run(2, as_in_torch, given, wanted, local, as_dtensor, 4)
    for wanted in (Replicate(), Shard(1)):
        ranks.run(2, as_in_torch, Partial(), wanted, True, as_dtensor, 5)  # of which rank 0 has one more


class Branches(nn.Module):
    """Two branches in parallel, as in GPT-NeoX and Cohere. Their outputs are added."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.value, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x))) + self.output(torch.sigmoid(self.value(x)))
        return y


def branches(me: Rank, layout: Placement, compiled: bool) -> None:
    torch.manual_seed(0)
    plan = {
        "": ours.PrepareModuleInputOutput(
            input_layouts=layout,
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Partial(),
            desired_output_layouts=layout,
        ),
        **dict.fromkeys(("up", "value"), ours.ColwiseParallel()),
        **dict.fromkeys(("down", "output"), ours.RowwiseParallel(output_layouts=Partial())),
    }
    whole, x = Branches().double(), values((2, 4, WIDTH))

    def parallelized(module: nn.Module, mesh: Any) -> nn.Module:
        module = parallelize_module(module, mesh, plan)
        if compiled:
            module.compile(backend="aot_eager", fullgraph=True)
        return module

    model = equals_whole(me, whole, parallelized, x, layout, layout)
    with torch.no_grad():
        model = parallelize_module(copy.deepcopy(whole), mesh_of(me), plan)
        mine = x.chunk(me.world, 1)[me.rank] if isinstance(layout, Shard) else x
        program = torch.export.export(model, (mine,), strict=False)
        torch.testing.assert_close(program.module()(mine + 1), model(mine + 1), **EXACT)
        names = [str(node.target) for node in program.graph.nodes]
        assert sum("reduce_scatter" in name or "all_reduce" in name for name in names) == 1, names


@pytest.mark.parametrize("layout", one_in(2, [Shard(1), Replicate()]), ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_branches_are_added_and_reduced_once(ranks: Pool, compiled: bool, layout: Placement) -> None:
    ranks.run(2, branches, layout, compiled)


def exchanged(me: Rank, x: Tensor) -> None:
    """Compare torch's style with ours without gradients, where one shard becomes another."""
    found: list[Tensor] = []
    for styles in (parallel, ours):
        style = styles.PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Shard(1))
        with torch.no_grad():
            found.append(parallelize_module(nn.Identity(), mesh_of(me), style)(x))
    assert found[1].shape == found[0].shape
    assert torch.equal(found[1], found[0])
    assert found[1].is_contiguous() or not found[0].is_contiguous()


def test_shards_in_other_memory_orders_and_empty_ones_are_exchanged(ranks: Pool) -> None:
    x = values((2, 4, 2, 4))
    for given in (x.to(memory_format=torch.channels_last), x.transpose(0, 3), x[..., :0], x[:, :, :0], x.float().mT):
        ranks.run(2, exchanged, given)


def wrong_outputs(me: Rank) -> None:
    mesh = mesh_of(me)
    one = ours.PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    with pytest.raises(ValueError, match="Twice returned 2 outputs, and the style has 1 layouts"):
        parallelize_module(Twice(), mesh, one)(torch.ones(2, 2))

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    nothing = parallelize_module(Nothing(), mesh, one)
    with pytest.raises(TypeError, match="PrepareModuleOutput: an output of Nothing is NoneType"):
        nothing(torch.ones(2, 2))
    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(parallelize_module(nn.Identity(), mesh, one))


def test_wrong_outputs(ranks: Pool) -> None:
    ranks.run(2, wrong_outputs)
