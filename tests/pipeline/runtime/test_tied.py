"""Parameters of several stages can be tied: on one rank, frozen, or unused. All ranks must name the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from tests.pipeline.runtime.models import Layer, assert_gradients, batch, gradients, reference, squared
from tests.pipeline.runtime.test_contract import TRANSPORTS, runtime_of
from tests.ranks import Pool, Rank


def layers(me: Rank, count: int) -> list[nn.Module]:
    return [Layer(stage) for stage in range(count)]


def on_one_rank(me: Rank) -> None:
    whole, mine = layers(me, 2), layers(me, 2)
    whole[1].linear.weight = whole[0].linear.weight
    tied = [[(0, "linear.weight"), (1, "linear.weight")]]
    runtime = runtime_of(me, "Interleaved1F1B", 4, mine, loss=squared, tied=tied)
    for step in range(2):
        x, target = batch(4, step)
        wanted = reference(whole, x, target, 4)[2]
        runtime.step(x, target=target)
        for stage in range(2):
            assert_gradients(gradients(mine[stage]), wanted[stage])


def test_copies_on_one_rank_are_one_parameter_too(ranks: Pool) -> None:
    ranks.run(1, on_one_rank)


def replaced(me: Rank) -> None:
    """Whoever loads a state dict with ``assign=True`` replaces the parameters."""
    whole, mine = layers(me, 2), layers(me, 2)
    whole[1].linear.weight = whole[0].linear.weight
    runtime = runtime_of(me, "1F1B", 4, mine, loss=squared, tied=[[(0, "linear.weight"), (1, "linear.weight")]])
    for step in range(3):
        nn.ModuleList([*whole, *mine]).zero_grad()
        x, target = batch(4, step)
        wanted = reference(whole, x, target, 4)[2]
        runtime.step(x, target=target)
        assert_gradients(gradients(mine[me.rank]), wanted[me.rank])
        mine[me.rank].load_state_dict(mine[me.rank].state_dict(), assign=True)


def test_parameters_that_are_replaced_stay_tied(ranks: Pool) -> None:
    ranks.run(2, replaced)


def stepped(me: Rank, schedule: str, transport: str) -> None:
    """An optimizer in hooks, which steps and frees each gradient, must get the gradient of all copies."""
    whole, mine = layers(me, 2), layers(me, 2)
    whole[1].linear.weight = whole[0].linear.weight
    tied = [[(0, "linear.weight"), (1, "linear.weight")]]
    runtime = runtime_of(me, schedule, 1, mine, loss=squared, tied=tied, transport=transport)

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad, alpha=0.5)
        parameter.grad = None

    weights = {module.linear.weight for module in [*whole, *mine]}
    handles = [weight.register_post_accumulate_grad_hook(step) for weight in weights]
    for number in range(3):
        if number == 2:
            for handle in handles:
                handle.remove()
        x, target = batch(1, number)
        reference(whole, x, target, 1)
        runtime.step(x, target=target)
        torch.testing.assert_close(mine[me.rank].linear.weight, whole[0].linear.weight, rtol=1e-11, atol=1e-13)
        assert (mine[me.rank].linear.weight.grad is None) == (number < 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("schedule", ["GPipe", "ZB-H1"])
def test_hooks_of_copies_get_the_gradient_of_all_copies(ranks: Pool, schedule: str, transport: str) -> None:
    ranks.run(2, stepped, schedule, transport)


class Head(nn.Module):
    """A layer that multiplies by a weight of the shape of an embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def sparse(me: Rank) -> None:
    """The gradient of the embedding is sparse, and that of the head is dense."""
    embedding, head = nn.Embedding(6, 4, sparse=True).double(), Head()
    for weight in (embedding.weight, head.weight):
        weight.data = torch.arange(24.0, dtype=torch.float64).view(6, 4) / 24
    tied = [[(0, "weight"), (1, "weight")]]
    runtime = runtime_of(me, "1F1B", 2, [embedding, head], loss=squared, tied=tied)
    ids, target = torch.tensor([1, 3, 1, 5]), torch.ones(4, 6, dtype=torch.float64)
    runtime.step(ids, target=target)
    weight = head.weight.detach().requires_grad_()
    for part, wanted in zip(ids.chunk(2), target.chunk(2), strict=True):
        (squared(weight[part] @ weight.t(), wanted) / 2).backward()
    torch.testing.assert_close((embedding, head)[me.rank].weight.grad, weight.grad)


def test_a_sparse_gradient_is_added_to_dense_ones(ranks: Pool) -> None:
    ranks.run(2, sparse)


def sharded(me: Rank) -> None:
    """Two ranks share the embedding and the head. torch gives the embedding's weight a gradient of another layout."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "tensor"))
    embedding, head = nn.Embedding(6, 4).double(), nn.Linear(4, 6, bias=False).double()
    values = torch.arange(24.0, dtype=torch.float64).view(6, 4) / 24
    for module in (embedding, head):
        module.weight.data = values.clone()
    rowwise = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(embedding, mesh["tensor"], rowwise)
    parallelize_module(head, mesh["tensor"], ColwiseParallel(output_layouts=Replicate()))
    stages = [Stage(embedding, 0), Stage(head, 1)]
    schedule, group = generate("Interleaved1F1B", 1, 2, 2), mesh.get_group("pipeline")
    runtime = PipelineRuntime(stages, schedule, group=group, loss=squared, tied=[[(0, "weight"), (1, "weight")]])
    ids, target = torch.tensor([1, 3, 1, 5]), torch.ones(4, 6, dtype=torch.float64)
    runtime.step(ids, target=target)
    weight = values.clone().requires_grad_()
    for part, wanted in zip(ids.chunk(2), target.chunk(2), strict=True):
        (squared(weight[part] @ weight.t(), wanted) / 2).backward()
    for module in (embedding, head):
        assert isinstance(module.weight.grad, DTensor)
        assert module.weight.grad.placements == module.weight.placements
        torch.testing.assert_close(module.weight.grad.full_tensor(), weight.grad)


def summed(me: Rank) -> None:
    """Two ranks have a part of a sequence each. torch gives the norms partial sums for gradients."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "tensor"))
    whole, mine = nn.LayerNorm(4).double(), [nn.LayerNorm(4).double() for _ in range(2)]
    for norm in mine:
        parallelize_module(norm, mesh["tensor"], SequenceParallel(use_local_output=True))
    schedule, group = generate("Interleaved1F1B", 1, 2, 2), mesh.get_group("pipeline")
    tied = [[(0, name), (1, name)] for name in ("weight", "bias")]
    stages = [Stage(norm, stage) for stage, norm in enumerate(mine)]
    runtime = PipelineRuntime(stages, schedule, group=group, loss=dot, tied=tied)
    x, target = torch.randn(2, 4, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    runtime.step(x.chunk(2, 1)[me.rank], target=target.chunk(2, 1)[me.rank])
    (dot(whole(whole(x)), target) / 2).backward()
    for norm in mine:
        for got, wanted in zip(norm.parameters(), whole.parameters(), strict=True):
            assert isinstance(got.grad, DTensor)
            torch.testing.assert_close(got.grad.full_tensor(), wanted.grad)


def dot(result: Tensor, target: Tensor) -> Tensor:
    return (result * target).sum()


@pytest.mark.parametrize("program", [sharded, summed])
def test_gradients_are_laid_out_like_sharded_copies(fresh_ranks: Any, program: Any) -> None:
    fresh_ranks(2).run(2, program)


class Unused(nn.Module):
    """A layer with a parameter that it does not use."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.layer, self.spare = Layer(stage), nn.Parameter(torch.full((3,), float(stage), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def without_gradient(me: Rank, frozen: bool, transport: str) -> None:
    mine = [Unused(stage) for stage in range(me.world)]
    for module in mine:
        module.spare.requires_grad_(not frozen)
    tied = [[(0, "spare"), (me.world - 1, "spare")]]
    runtime = runtime_of(me, "1F1B", 4, list(mine), loss=squared, tied=tied, transport=transport)
    optimizer = torch.optim.AdamW(mine[me.rank].parameters(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        x, target = batch(4, step)
        runtime.step(x, target=target)
        assert mine[me.rank].spare.grad is None
        optimizer.step()
    first = 0.0 if me.rank in (0, me.world - 1) else float(me.rank)  # copies start with the value of the first stage
    assert mine[me.rank].spare.tolist() == [first] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("frozen", [True, False])
def test_copies_that_nobody_uses_get_no_gradient(ranks: Pool, frozen: bool, transport: str) -> None:
    ranks.run(3, without_gradient, frozen, transport)


class Used(Unused):
    """A layer that uses the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.spare.sum()


def used_by_one(me: Rank, transport: str) -> None:
    whole, mine = ([Used(0), Unused(1)] for _ in range(2))
    tied = [[(0, "spare"), (1, "spare")]]
    for module in (whole[0], mine[0]):
        nn.init.ones_(module.spare)
    runtime = runtime_of(me, "1F1B", 4, list(mine), loss=squared, tied=tied, transport=transport)
    for step in range(3):
        x, target = batch(4, step)
        wanted = reference(whole, x, target, 4)[2]
        runtime.step(x, target=target)
        torch.testing.assert_close(mine[me.rank].spare.grad, wanted[0]["spare"], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_copies_of_which_one_is_used_get_its_gradient(ranks: Pool, transport: str) -> None:
    ranks.run(2, used_by_one, transport)


OVERLAPPING = [
    [[(0, "spare"), (1, "spare")], [(1, "spare"), (3, "spare")]],
    [[(0, "spare"), (3, "spare")], [(1, "spare"), (3, "spare")], []],
    [[(3, "spare"), (1, "spare"), (1, "spare"), (0, "spare")]],
]


def in_several_lists(me: Rank, tied: list[list[tuple[int, str]]], transport: str) -> None:
    whole, mine = ([Used(stage) for stage in range(4)] for _ in range(2))
    for module in (whole[0], mine[0]):
        nn.init.ones_(module.spare)
    for stage in (1, 3):
        whole[stage].spare = whole[0].spare
    runtime = runtime_of(me, "Interleaved1F1B", 4, list(mine), loss=squared, tied=tied, transport=transport)
    for step in range(2):
        x, target = batch(4, step)
        wanted = reference(whole, x, target, 4)[2]
        runtime.step(x, target=target)
        for stage in runtime.schedule.stages_of_ranks[me.rank]:
            assert_gradients(gradients(mine[stage]), wanted[stage])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("number", range(len(OVERLAPPING)))
def test_lists_that_share_a_copy_are_one_list(ranks: Pool, number: int, transport: str) -> None:
    ranks.run(2, in_several_lists, OVERLAPPING[number], transport)


def in_two_pipelines(me: Rank, transport: str) -> None:
    whole = layers(me, 2)
    whole[1].linear.weight = whole[0].linear.weight
    mine = layers(me, 2) + layers(me, 2)  # the second pipeline has copies of the stages of the first
    tied = [[(0, "linear.weight"), (1, "linear.weight")]]
    runtime = runtime_of(me, "DualPipe", 4, mine, loss=squared, tied=tied, transport=transport)
    for step in range(2):
        x, target = batch(4, step)
        wanted = reference(whole, x, target, 4)[2]
        runtime.step(x, target=target)
        for stage in runtime.schedule.stages_of_ranks[me.rank]:
            assert_gradients(gradients(mine[stage]), wanted[stage % 2])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_copies_in_both_pipelines_are_tied(ranks: Pool, transport: str) -> None:
    ranks.run(2, in_two_pipelines, transport)


def under_two_names(me: Rank) -> None:
    mine = layers(me, 2)
    mine[0].other = mine[0].linear.bias
    tied = [[(0, "other"), (1, "norm.bias")], [(0, "linear.bias"), (1, "linear.bias")]]
    with pytest.raises(ValueError, match="share a parameter on rank 0, under two names: put all copies"):
        runtime_of(me, "Interleaved1F1B", 4, list(mine), loss=squared, tied=tied)


def test_one_parameter_under_two_names_is_told(ranks: Pool) -> None:
    ranks.run(1, under_two_names)


def named_differently(me: Rank) -> None:
    tied: Any = [[(0, "linear.weight"), (1, "linear.weight")]] if me.rank == 0 else []
    runtime = runtime_of(me, "1F1B", 4, layers(me, 2), loss=squared, tied=tied)
    with pytest.raises(ValueError, match="differ in their tied parameters"):
        runtime.step(batch(4)[0], target=batch(4)[1])


def test_ranks_that_name_different_ones_are_told(ranks: Pool) -> None:
    ranks.run(2, named_differently)
