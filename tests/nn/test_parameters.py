"""Parameters that are not as the style left them: written to, loaded in another layout, computed, or FSDP's shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrize, prune

from symm_overlap.nn import (
    ColumnParallelLinear,
    ColwiseParallel,
    RowParallelLinear,
    RowwiseParallel,
    SequenceParallel,
    column_parallel,
)
from tests.nn.blocks import HIDDEN, MLP, WIDTH, SwiGLU, mlp_plan
from tests.nn.blocks import whole as whole_input
from tests.nn.reference import EXACT, gradients, mesh_of, part, same_gradients, values
from tests.ranks import Pool, Rank

MODIFIED = "has been modified by an inplace operation"


def written_before_backward(me: Rank) -> None:
    """The optimizer steps between the forward and the backward pass, as by mistake in the training of two models."""
    for frozen in (False, True):
        model = parallelize_module(MLP().double(), mesh_of(me), mlp_plan(Shard(0), Shard(0)))
        x = values((2, WIDTH)).requires_grad_()
        for name in ("up", "down"):
            layer = getattr(model, name).requires_grad_(not frozen)
            loss = model(x).square().sum()
            with torch.no_grad():
                layer.weight.mul_(1.5)
            with pytest.raises(RuntimeError, match=MODIFIED):
                loss.backward()
        model(x).sum().backward()  # the next step is as usual


def test_a_weight_that_is_written_to_before_the_backward_pass_is_an_error(ranks: Pool) -> None:
    ranks.run(2, written_before_backward)


class Chain(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def loaded_whole(model: nn.Module, whole: nn.Module) -> Callable[[Tensor], Any]:
    mesh = model.up.weight.device_mesh  # type: ignore[union-attr]
    state = {name: distribute_tensor(value, mesh, [Replicate()]) for name, value in whole.state_dict().items()}
    model.load_state_dict(state, assign=True)  # type: ignore[arg-type]
    return model


def called_with_whole(model: nn.Module, whole: nn.Module) -> Callable[[Tensor], Any]:
    mesh = model.up.weight.device_mesh  # type: ignore[union-attr]
    state = {name: distribute_tensor(value.detach(), mesh, [Replicate()]) for name, value in whole.named_parameters()}
    return lambda x: torch.func.functional_call(model, state, (x,))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight[:WIDTH].tril() + weight[:WIDTH].tril(-1).t()


def parametrized(model: nn.Module, whole: nn.Module) -> Callable[[Tensor], Any]:
    for module in (model, whole):
        parametrize.register_parametrization(module.up, "weight", Symmetric(), unsafe=True)  # type: ignore[arg-type]
    return model


def other_layout(me: Rank, change: Callable[[nn.Module, nn.Module], Callable[[Tensor], Any]]) -> None:
    torch.manual_seed(0)
    whole = Chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    model = parallelize_module(copy.deepcopy(whole), mesh_of(me), mlp_plan(Replicate(), Replicate()))
    if change is not parametrized:  # so that only the other values give the result
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    call, x = change(model, whole), values((3, WIDTH))
    expected, found = whole(x), call(x)
    torch.testing.assert_close(found, expected, **EXACT)
    if call is model:
        expected.square().sum().backward()
        found.square().sum().backward()
        same_gradients(model, whole, **EXACT)


@pytest.mark.parametrize("change", [loaded_whole, called_with_whole, parametrized])
def test_parameters_of_another_layout_are_laid_out(ranks: Pool, change: Callable[..., Any]) -> None:
    """As with torch's styles, where every operation on a DTensor goes by its layout."""
    ranks.run(2, other_layout, change)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * weight


def pruned(layer: nn.Module, name: str) -> None:
    value = getattr(layer, name)
    mask = torch.arange(value.numel(), dtype=value.dtype).remainder(3).sign().view(value.shape)
    mask = distribute_tensor(mask, value.device_mesh, value.placements) if isinstance(value, DTensor) else mask
    prune.custom_from_mask(layer, name, mask)


def computed_with_each_call(me: Rank) -> None:
    """Parameters that a hook sets before each call, or a parametrization computes, of layers and of a norm."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.LayerNorm(WIDTH), SwiGLU()).double()
    nn.init.normal_(whole[0].weight)
    model, mesh = copy.deepcopy(whole), mesh_of(me)
    column = {"": whole_input(1), "gate": ColwiseParallel(), "up": ColwiseParallel()}
    parallelize_module(model[1], mesh, {**column, "down": RowwiseParallel(output_layouts=Shard(1))})
    parallelize_module(model[0], mesh, SequenceParallel(use_local_output=True))
    counts = []
    for each in (whole, model):
        norm, layers = each[0], each[1]
        pruned(layers.gate, "weight")
        pruned(norm, "weight")
        counts.append(Counted())
        parametrize.register_parametrization(layers.up, "weight", counts[-1])
        parametrize.register_parametrization(norm, "bias", nn.Identity())
        counts[-1].calls = 0
    for seed in range(2):
        x = values((2, 2 * me.world, WIDTH), seed).requires_grad_()
        mine = part(me, x.detach(), Shard(1)).clone().requires_grad_()
        expected, found = whole(x), model(mine)
        torch.testing.assert_close(found, part(me, expected, Shard(1)), **EXACT)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(mine.grad, part(me, x.grad, Shard(1)), **EXACT)
    same_gradients(model, whole, **EXACT)
    assert [count.calls for count in counts] == [2, 2]


def pruned_before(me: Rank) -> None:
    """torch's own style makes DTensors of the mask too."""
    torch.manual_seed(0)
    whole = nn.LayerNorm(WIDTH).double()
    nn.init.normal_(whole.weight)
    pruned(whole, "weight")
    model = nn.LayerNorm(WIDTH).double()
    pruned(model, "weight")
    model.load_state_dict(whole.state_dict())
    parallelize_module(model, mesh_of(me), SequenceParallel(use_local_output=True))
    x = values((2, 2 * me.world, WIDTH))
    expected, found = whole(x), model(part(me, x, Shard(1)))
    torch.testing.assert_close(found, part(me, expected, Shard(1)), **EXACT)
    expected.square().sum().backward()
    found.square().sum().backward()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        torch.testing.assert_close(
            grad.full_tensor() if isinstance(grad, DTensor) else grad, whole.get_parameter(name).grad, **EXACT
        )


def test_a_norm_that_was_pruned_before_the_style(ranks: Pool) -> None:
    ranks.run(2, pruned_before)


def test_parameters_that_are_computed_with_each_call(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(world, computed_with_each_call)


def of_another_mesh(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    block = Chain(
        ColumnParallelLinear(WIDTH, HIDDEN, mesh=mesh["tp"]), RowParallelLinear(HIDDEN, WIDTH, mesh=mesh["tp"])
    )
    model = fully_shard(nn.Sequential(block), mesh=mesh["dp"])
    x = torch.ones(2, WIDTH)
    for layer, shape in ((block.up, (2, WIDTH)), (block.down, (2, HIDDEN // 2))):
        with pytest.raises(ValueError, match="call the module that fully_shard was applied to"):
            layer(torch.ones(shape))
    with pytest.raises(ValueError, match="call the module that fully_shard was applied to"):
        column_parallel(x, [block.up])
    model(x).sum().backward()


def test_shards_of_fsdp_are_no_weights(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(4).run(4, of_another_mesh)


def hooked(me: Rank) -> None:
    layers = [ColumnParallelLinear(WIDTH, HIDDEN, mesh=mesh_of(me), sequence_dim=0).double() for _ in range(3)]
    layers[1].register_forward_hook(lambda module, args, output: output * 0)
    layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    x = part(me, values((4, WIDTH)), Shard(0))
    alone, together = [layer(x) for layer in layers], column_parallel(x, layers)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
    sum(output.square().sum() for output in together).backward()
    found = [dict(gradients(layer)) for layer in layers]
    assert isinstance(layers[1].weight, DTensor)
    assert not found[1]["weight"].count_nonzero()  # type: ignore[union-attr]
    assert found[2]["weight"].count_nonzero()  # type: ignore[union-attr]


def test_layers_that_share_a_gather_run_their_hooks(ranks: Pool) -> None:
    ranks.run(2, hooked)
