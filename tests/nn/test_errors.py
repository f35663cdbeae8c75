"""What parallel layers and styles reject before any communication, and their error messages."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.utils import parametrize, prune

from symm_overlap.nn import (
    ColumnParallelLinear,
    ColwiseParallel,
    PrepareModuleInput,
    RowParallelLinear,
    RowwiseParallel,
    SequenceParallel,
    column_parallel,
)
from tests.nn.reference import mesh_of
from tests.ranks import Pool, Rank

STYLES = (ColwiseParallel, RowwiseParallel, SequenceParallel)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def styles(me: Rank) -> None:
    mesh = mesh_of(me)

    def rejects(style: ParallelStyle, module: nn.Module, error: type[Exception], says: str) -> None:
        with pytest.raises(error, match=says):
            parallelize_module(module, mesh, style)

    rejects(ColwiseParallel(), nn.Linear(4, 7), ValueError, "out_features 7: 7 cannot be shared evenly by 2 ranks")
    rejects(ColwiseParallel(parts=3), nn.Linear(4, 9), ValueError, "out_features 9: 3 in each of 3 parts cannot be")
    rejects(ColwiseParallel(parts=3), nn.Linear(4, 8), ValueError, "out_features 8 cannot be cut into 3 equal parts")
    rejects(RowwiseParallel(parts=3), nn.Linear(9, 4), ValueError, "in_features 9: 3 in each of 3 parts cannot be")
    rejects(RowwiseParallel(parts=3), nn.Linear(8, 4), ValueError, "in_features 8 cannot be cut into 3 equal parts")
    rejects(RowwiseParallel(), nn.Linear(7, 4), ValueError, "in_features 7: 7 cannot be shared evenly by 2 ranks")
    for style in (ColwiseParallel(), RowwiseParallel()):
        for module in (nn.LayerNorm(4), OwnLinear(4, 4), nn.Conv1d(4, 4, 1)):
            rejects(style, module, NotImplementedError, rf"not for \S+\.{type(module).__name__}\b")
        rejects(style, OwnLinear(4, 4), NotImplementedError, "OwnLinear, whose forward is not that of nn.Linear")
        replaced = nn.Linear(4, 4)
        replaced.forward = MethodType(lambda layer, x: F.linear(x, 2 * layer.weight), replaced)  # type: ignore[method-assign]
        rejects(style, replaced, NotImplementedError, "the forward of this Linear was replaced on the instance")
    for style in STYLES:
        module = nn.LayerNorm(4) if style is SequenceParallel else nn.Linear(4, 4)
        parallelize_module(module, mesh, style())
        rejects(style(), module, ValueError, "is a DTensor already")
    prepared = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    rejects(prepared, parallelize_module(nn.Identity(), mesh, prepared), ValueError, "has this style already")
    named = PrepareModuleInput(linears=["q"], input_layouts=Shard(1), desired_input_layouts=Replicate())
    rejects(named, nn.Sequential(nn.Linear(4, 4)), ValueError, "names 'q', and Sequential has no such module: it has 0")
    with pytest.raises(ValueError, match="share a whole input, but no input has the desired layout Replicate"):
        PrepareModuleInput(linears=["a"], input_layouts=(Shard(1), None), desired_input_layouts=(Shard(0), None))


def meshes(me: Rank) -> None:
    several = init_device_mesh("cpu", (1, me.world), mesh_dim_names=("dp", "tp"))
    for style in STYLES:
        module = nn.LayerNorm(4) if style is SequenceParallel else nn.Linear(20, 20)
        with pytest.raises(ValueError, match="needs a mesh of one dimension"):
            parallelize_module(module, several, style())
        parallelize_module(module, several["tp"], style())
    for layer in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(ValueError, match="needs a mesh of one dimension"):
            layer(20, 20, mesh=several)
        with pytest.raises(TypeError, match="pass a DeviceMesh"):
            layer(20, 20, mesh=me.group)  # type: ignore[arg-type]


def layers(me: Rank) -> None:
    mesh = mesh_of(me)
    parametrized = parametrize.register_parametrization(nn.Linear(4, 4), "weight", nn.Identity())
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(ValueError, match="weight of ParametrizedLinear is parametrized already: apply the style"):
            parallelize_module(parametrized, mesh, style)
    for computed in (prune.identity(nn.Linear(4, 4), "weight"), nn.utils.weight_norm(nn.Linear(4, 4))):
        for style in (ColwiseParallel(), RowwiseParallel()):
            with pytest.raises(ValueError, match=r"weight of Linear is computed by a hook before each call .*remove"):
                parallelize_module(computed, mesh, style)
    with pytest.raises(ValueError, match="several outputs of one weight must have one size"):
        ColumnParallelLinear(4, [4, 2], mesh=mesh)
    with pytest.raises(ValueError, match="several inputs of one weight must have one size"):
        RowParallelLinear([4, 2], 4, mesh=mesh)
    with pytest.raises(ValueError, match="out_features 7"):
        ColumnParallelLinear(4, 7, mesh=mesh)
    with pytest.raises(ValueError, match="in_features 7"):
        RowParallelLinear(7, 4, mesh=mesh)
    with pytest.raises(ValueError, match=r"out_features \[4, 4\] add up to 8, but the linear has 4"):
        ColumnParallelLinear.from_linear(nn.Linear(4, 4), mesh=mesh, out_features=[4, 4])
    with pytest.raises(ValueError, match=r"in_features \[4, 4\] add up to 8, but the linear has 4"):
        RowParallelLinear.from_linear(nn.Linear(4, 4), mesh=mesh, in_features=[4, 4])
    with pytest.raises(TypeError, match="Linear is not column-parallel"):
        column_parallel(torch.ones(2, 4), [nn.Linear(4, 4)])
    with pytest.raises(ValueError, match="at least one module"):
        column_parallel(torch.ones(2, 4), [])


def calls(me: Rank) -> None:
    mesh = mesh_of(me)
    column = ColumnParallelLinear(4, 4, mesh=mesh, sequence_dim=1)
    row = RowParallelLinear(4, 4, mesh=mesh, sequence_dim=1)
    with pytest.raises(ValueError, match="must have at least 2 dimensions"):
        column(torch.ones(4))
    with pytest.raises(ValueError, match="does not match"):
        column(torch.ones(2, 3, 5))
    with pytest.raises(ValueError, match="2 ranks cannot share evenly"):
        row(torch.ones(2, 3, 2))
    with pytest.raises(TypeError, match="the input is NoneType"):
        column(None)
    other = DeviceMesh.from_group(me.groups[(0, 1, 2, 3, 4)], "cpu")
    with pytest.raises(ValueError, match="and the module is on"):
        column(DTensor.from_local(torch.ones(2, 3, 4), other, [Replicate()], run_check=False))
    norm = parallelize_module(nn.LayerNorm(4), mesh, SequenceParallel())
    uneven = DTensor.from_local(torch.ones(2, 2 - me.rank, 4), mesh, [Shard(1)], shape=(2, 3, 4), stride=(12, 4, 1))
    with pytest.raises(ValueError, match="cannot be shared evenly by 2 ranks"):
        norm(uneven)
    prepared = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    with pytest.raises(
        ValueError, match="should have same length! The module got 0 positional inputs, but input_layouts describes 1"
    ):
        parallelize_module(nn.Identity(), mesh, prepared)(input=torch.ones(2, 4))
    for layout in (Shard(1), Replicate()):
        plan = PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())
        sharing = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"": plan, "0": ColwiseParallel()})
        with pytest.raises(TypeError, match="the input is NoneType"):
            sharing(None)
    prepared.linears = ["0"]
    sequential = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, prepared)
    with pytest.raises(TypeError, match="Linear is not column-parallel"):
        sequential(torch.ones(2, 4))


def ties(me: Rank) -> None:
    """A parameter shared by two modules stays one parameter, and cannot be sharded in two ways."""
    mesh = mesh_of(me)
    for order in (("embedding", "head"), ("head", "embedding")):
        plan = {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}
        model = Tied()
        parallelize_module(model, mesh, {name: plan[name] for name in order})
        assert model.head.weight is model.embedding.weight
        assert isinstance(model.head.weight, DTensor)
        other = {**plan, "embedding": ColwiseParallel()}
        with pytest.raises(ValueError, match="shared with another module, which has sharded it as"):
            parallelize_module(Tied(), mesh, {name: other[name] for name in order})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("check", [styles, layers, calls, ties], ids=lambda check: check.__name__)
def test_what_is_rejected(ranks: Pool, check: object) -> None:
    ranks.run(2, check)  # type: ignore[arg-type]


def test_meshes_of_several_dimensions_are_rejected(ranks: Pool) -> None:
    ranks.run(5, meshes)
