"""Derivatives of gradients, as a gradient penalty needs them, are those of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

import symm_overlap
from symm_overlap.nn import ColumnParallelLinear, ColwiseParallel, RowwiseParallel
from tests.nn.blocks import MLP, WIDTH, Block, block_plan, mlp_plan
from tests.nn.blocks import whole as gathered
from tests.nn.reference import EXACT, TORCH, WHOLE, full, mesh_of, part, values
from tests.ranks import Pool, Rank
from tests.transforms import choices

WORLD = 2


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of DTensors, and of this rank's parts of other tensors."""
    return torch.stack([full(each.square().sum()) for each in tensors]).sum()


def derivatives(module: nn.Module, x: Tensor) -> list[list[Tensor]]:
    """Return the first, second and third derivatives by the input and by all parameters.

    The n-th ones are those of the sum of squares of the ones before. Before torch 2.13, the gradient of a DTensor
    cannot be differentiated, so they are those of the one by the input.
    """
    sources = [x, *module.parameters()]
    found = [[module(x)]]
    for order in range(3):
        before = found[-1] if TORCH >= (2, 13) else found[-1][:1]
        found.append(list(grad(squares(before), sources, create_graph=order < 2)))
    return found[1:]


def are_those_of_the_whole(me: Rank, dim: int | None, path: str) -> None:
    torch.manual_seed(0)
    whole = Block().double()
    model = parallelize_module(copy.deepcopy(whole), mesh_of(me), block_plan(dim))
    layout = Replicate() if dim is None else Shard(dim)
    x = values((2, 4, WIDTH))
    # CPUs have no second derivatives of fused attention.
    with symm_overlap.force_path(path), sdpa_kernel(SDPBackend.MATH):
        expected = derivatives(whole, x.clone().requires_grad_())
        found = derivatives(model, part(me, x, layout).clone().requires_grad_())
    names = ["x", *(name for name, _ in whole.named_parameters())]
    for order, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
        largest = max(float(each.abs().max()) for each in theirs)
        for name, one, other in zip(names, ours, theirs, strict=True):
            wanted = part(me, other, layout) if name == "x" else other
            torch.testing.assert_close(
                full(one), wanted, msg=lambda text, at=(order, name): f"{at}: {text}", rtol=0, atol=1e-12 * largest
            )


@pytest.mark.parametrize("path", ["pipelined", "c10d"])
@pytest.mark.parametrize("dim", [None, 1])
def test_second_and_third_derivatives_are_those_of_the_whole_model(ranks: Pool, dim: int | None, path: str) -> None:
    ranks.run(WORLD, are_those_of_the_whole, dim, path)


def hessians(me: Rank) -> None:
    torch.manual_seed(0)
    whole = MLP().double()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(whole), mesh_of(me), plan)
    x = values((2, WIDTH))
    for strict in (False, True):
        found, expected = (
            torch.autograd.functional.hessian(lambda x, f=f: f(x).square().sum(), x, strict=strict)
            for f in (model, whole)
        )
        torch.testing.assert_close(found, expected, **EXACT)


def test_hessians_are_those_of_the_whole_model(ranks: Pool) -> None:
    ranks.run(WORLD, hessians)


def outputs_of_other_layouts(me: Rank) -> None:
    """A bias that each rank adds a part of, and an input of one dimension."""
    for output in (Replicate(), Partial(), Shard(0)):
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=output, use_local_output=False)}
        model = parallelize_module(copy.deepcopy(whole), mesh_of(me), plan)
        found, expected = [], []
        for to, module in ((found, model), (expected, whole)):
            x = values((4, WIDTH)).requires_grad_()
            y = module(x)
            y = y.redistribute(placements=[Replicate()]).to_local() if isinstance(y, DTensor) else y
            (first,) = grad(y.square().sum(), x, create_graph=True)
            to += [first, *grad(first.square().sum(), [x, module[0].weight, module[2].weight])]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(full(one), other, **EXACT)


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 does not differentiate gradients of DTensors")
def test_outputs_of_other_layouts(ranks: Pool) -> None:
    ranks.run(WORLD, outputs_of_other_layouts)


class UsesItsInput(MLP):
    """A module that uses its input, which is gathered, itself too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x**3


def gathered_input(me: Rank) -> None:
    torch.manual_seed(0)
    whole = UsesItsInput().double()
    layout = Shard(1)
    plan = {"": gathered(1), "up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(whole), mesh_of(me), plan)
    x = values((2, 4, WIDTH))
    found, expected = [], []
    for to, module, mine in ((found, model, part(me, x, layout)), (expected, whole, x)):
        mine = mine.clone().requires_grad_()
        (first,) = grad(module(mine).square().sum(), mine, create_graph=True)
        to += [first, *grad(first.square().sum(), mine)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, part(me, other, layout), rtol=1e-10, atol=1e-10)


def test_an_input_that_is_gathered_and_also_used_itself(ranks: Pool) -> None:
    ranks.run(WORLD, gathered_input)


def in_settings_of_the_forward_pass(me: Rank) -> None:
    for dim in (None, 1):
        layout = Replicate() if dim is None else Shard(dim)
        model = parallelize_module(UsesItsInput().double(), mesh_of(me), {"": gathered(dim), **mlp_plan(WHOLE, WHOLE)})
        x = part(me, values((2, 4, WIDTH)), layout).clone().requires_grad_()
        with choices() as calls:
            with symm_overlap.force_path("pipelined", chunks=2):
                y = model(x)
            for _ in range(3):
                (y,) = grad(y.square().sum(), x, create_graph=True)
        assert len(calls) > 6
        assert {(choice.path, choice.reason) for _, choice in calls} == {("pipelined", "forced")}, calls


def test_all_derivatives_have_the_settings_of_the_forward_pass(ranks: Pool) -> None:
    ranks.run(WORLD, in_settings_of_the_forward_pass)


def transformed(me: Rank) -> None:
    layer = ColumnParallelLinear(WIDTH, WIDTH, mesh=mesh_of(me)).double()
    x = values((2, WIDTH))
    for transform in (torch.func.grad, torch.func.jacrev, lambda f: torch.func.vmap(f, in_dims=0)):
        with pytest.raises(NotImplementedError, match=r"cannot be transformed by torch\.func .*functional_call works"):
            transform(lambda x: layer(x).sum())(x)
    weights = dict(layer.named_parameters())
    with pytest.raises(NotImplementedError, match=r"cannot be transformed by torch\.func"):
        torch.func.grad(lambda weights: torch.func.functional_call(layer, weights, (x,)).sum())(weights)
    same = torch.func.functional_call(layer, weights, (x,))
    torch.testing.assert_close(same, layer(x), **EXACT)


def test_transforms_of_functions_are_refused(ranks: Pool) -> None:
    ranks.run(WORLD, transformed)
