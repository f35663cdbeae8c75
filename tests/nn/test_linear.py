"""`ColumnParallelLinear` and `RowParallelLinear` match ``nn.Linear`` in values, gradients, parameters, checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint.state_dict as checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from symm_overlap.nn import ColumnParallelLinear, RowParallelLinear, column_parallel
from tests.nn.reference import EXACT, WORLDS, equals_whole, full, mesh_of, needs_strided_shards, values, weighted
from tests.ranks import Pool, Rank
from tests.transforms import choices

WIDTH, HIDDEN = 8, 24


def layers(me: Rank, dim: int | None, bias: bool) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias), nn.Tanh(), nn.Linear(HIDDEN, WIDTH, bias)).double()

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        up = ColumnParallelLinear.from_linear(module[0], mesh=mesh, sequence_dim=dim)
        return nn.Sequential(up, nn.Tanh(), RowParallelLinear.from_linear(module[2], mesh=mesh, sequence_dim=dim))

    layout = Replicate() if dim is None else Shard(dim)
    equals_whole(me, whole, parallelize, values((4, 8, WIDTH)), layout, layout)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_layers_made_from_linear_layers(ranks: Pool, world: int, bias: bool) -> None:
    for dim in (None, 0, 1, -2):
        ranks.run(world, layers, dim, bias)


class Fused(nn.Module):
    """Three outputs of one weight. In the parallel layer, each rank has its part of all three outputs."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        a, b, c = y.chunk(3, -1) if isinstance(y, Tensor) else y
        return torch.tanh(a) * b + c


def fused(me: Rank, dim: int | None) -> None:
    torch.manual_seed(0)

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        sizes = [HIDDEN // 3] * 3
        linear = ColumnParallelLinear.from_linear(module.linear, mesh=mesh, sequence_dim=dim, out_features=sizes)
        return Fused(linear)

    layout = Replicate() if dim is None else Shard(dim)
    whole = Fused(nn.Linear(WIDTH, HIDDEN)).double()
    equals_whole(me, whole, parallelize, values((4, 8, WIDTH)), layout, Shard(-1))


@needs_strided_shards
@pytest.mark.parametrize("world", WORLDS)
def test_several_outputs_of_one_weight(ranks: Pool, world: int) -> None:
    for dim in (None, 1):
        ranks.run(world, fused, dim)


class Two(nn.Module):
    """Two layers of different sizes on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sum(-1) + self.b(x).square().sum(-1)


def together(me: Rank, dim: int | None) -> list[str]:
    torch.manual_seed(0)
    whole = Two().double()
    mesh = mesh_of(me)
    a, b = (ColumnParallelLinear.from_linear(each, mesh=mesh, sequence_dim=dim) for each in (whole.a, whole.b))
    everything = values((4, 8, WIDTH)).requires_grad_()
    mine = (everything if dim is None else everything.chunk(me.world, dim)[me.rank]).detach().requires_grad_()
    ys = [whole.a(everything), whole.b(everything)]
    with choices() as calls:
        found = column_parallel(mine, [a, b])
        for y, z in zip(ys, found, strict=True):
            torch.testing.assert_close(z, y.chunk(me.world, -1)[me.rank], **EXACT)
        weights = [values(tuple(y.shape)) for y in ys]
        parts = [weight.chunk(me.world, -1)[me.rank] for weight in weights]
        sum(weighted(z, weight) for z, weight in zip(found, parts, strict=True)).backward()
    sum(weighted(y, weight) for y, weight in zip(ys, weights, strict=True)).backward()
    gradient = everything.grad if dim is None else everything.grad.chunk(me.world, dim)[me.rank]
    torch.testing.assert_close(mine.grad, gradient, **EXACT)
    for layer, linear in ((a, whole.a), (b, whole.b)):
        torch.testing.assert_close(full(layer.weight.grad), linear.weight.grad, **EXACT)
    return [op for op, _ in calls]


@pytest.mark.parametrize("world", WORLDS)
def test_layers_that_are_called_together_share_one_exchange_forward_and_one_backward(ranks: Pool, world: int) -> None:
    sequence, replicated = (ranks.run(world, together, dim)[0] for dim in (1, None))
    assert sequence == ["all_gather_matmul", "matmul_reduce_scatter", "all_gather_matmul"]
    assert replicated == ["matmul_all_reduce"]


def init(me: Rank) -> None:
    mesh = mesh_of(me)
    for bias in (True, False):
        torch.manual_seed(3)
        linear = nn.Linear(WIDTH, HIDDEN, bias)
        for make in (ColumnParallelLinear, RowParallelLinear):
            torch.manual_seed(3)
            layer = make(WIDTH, HIDDEN, bias, mesh=mesh)
            same_parameters(layer, linear)
            late = make(WIDTH, HIDDEN, bias, mesh=mesh, device="meta")
            assert all(parameter.is_meta for parameter in late.parameters())
            late.to_empty(device="cpu")
            torch.manual_seed(3)
            late.reset_parameters()
            same_parameters(late, linear)
    linear = nn.Linear(WIDTH, HIDDEN, dtype=torch.bfloat16).requires_grad_(False)
    layer = ColumnParallelLinear.from_linear(linear, mesh=mesh)
    assert layer.weight.dtype == torch.bfloat16
    assert not layer.weight.requires_grad


def same_parameters(layer: nn.Module, linear: nn.Module) -> None:
    found, expected = dict(layer.named_parameters()), dict(linear.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert isinstance(found[name].data, DTensor)
        assert torch.equal(full(found[name]), parameter), name


@pytest.mark.parametrize("world", WORLDS)
def test_a_layer_begins_with_the_values_of_the_whole_layer_also_by_way_of_the_meta_device(
    ranks: Pool, world: int
) -> None:
    ranks.run(world, init)


def values_of_one_rank(me: Rank) -> None:
    torch.manual_seed(me.rank)
    linear = nn.Linear(WIDTH, HIDDEN)
    torch.manual_seed(1)
    of_one = nn.Linear(WIDTH, HIDDEN)
    for make in (ColumnParallelLinear, RowParallelLinear):
        same_parameters(make.from_linear(linear, mesh=mesh_of(me), src_data_rank=1), of_one)
    several = ColumnParallelLinear.from_linear(linear, mesh=mesh_of(me), src_data_rank=1, out_features=[8, 8, 8])
    same_parameters(several, of_one)


@needs_strided_shards
def test_all_ranks_get_the_values_of_the_rank_that_is_asked_for(ranks: Pool) -> None:
    ranks.run(2, values_of_one_rank)


def checkpoints(me: Rank) -> None:
    torch.manual_seed(0)
    mesh = mesh_of(me)
    whole = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))

    def make() -> nn.Module:
        torch.manual_seed(7)
        column = ColumnParallelLinear(WIDTH, HIDDEN, mesh=mesh)
        several = ColumnParallelLinear(WIDTH, [HIDDEN // 3] * 3, mesh=mesh)
        return nn.Sequential(column, several, RowParallelLinear(HIDDEN, WIDTH, mesh=mesh))

    model, everything = make(), checkpoint.StateDictOptions(full_state_dict=True)
    assert model.state_dict().keys() == whole.state_dict().keys()
    checkpoint.set_model_state_dict(model, whole.state_dict(), options=everything)
    same_parameters(model, whole)
    other = make()
    other.load_state_dict(model.state_dict())  # shard by shard
    same_parameters(other, whole)
    torch.testing.assert_close(checkpoint.get_model_state_dict(other, options=everything), dict(whole.state_dict()))


@needs_strided_shards
def test_checkpoints_are_those_of_the_whole_layers(ranks: Pool) -> None:
    """Parallel layers can load the state dict of whole layers, and can produce one."""
    for world in (1, 2):
        ranks.run(world, checkpoints)


def strides(me: Rank, dim: int | None) -> None:
    mesh = mesh_of(me)
    column = ColumnParallelLinear(WIDTH, HIDDEN, mesh=mesh, sequence_dim=dim)
    row = RowParallelLinear(HIDDEN, WIDTH, mesh=mesh, sequence_dim=dim)
    arrived: list[tuple[int, ...]] = []
    for weight in (column.weight, row.weight):
        weight.register_hook(lambda gradient: arrived.append(gradient.to_local().stride()))
    row(column(torch.randn(2, 4, WIDTH))).sum().backward()
    assert arrived == [row.weight.to_local().stride(), column.weight.to_local().stride()]


def test_the_gradient_of_a_weight_lies_in_memory_as_the_weight_does(ranks: Pool) -> None:
    for dim in (None, 1):
        ranks.run(2, strides, dim)
