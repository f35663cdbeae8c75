"""Parallel models under autocast, without gradients, on another lane, with FSDP2, and partly frozen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import symm_overlap
from symm_overlap.collective.exchange import Call
from symm_overlap.nn import ColumnParallelLinear, PrepareModuleInput, RowParallelLinear
from tests.nn.blocks import HIDDEN, MLP, WIDTH, Block, block_plan, mlp_plan
from tests.nn.reference import EXACT, equals_whole, full, mesh_of, part, same_gradients, values
from tests.ranks import Pool, Rank
from tests.transforms import choices

LAYOUTS = [None, 1]


def layout(dim: int | None) -> Any:
    return Replicate() if dim is None else Shard(dim)


def parallel(me: Rank, dim: int | None, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    whole = Block().to(dtype)
    return whole, parallelize_module(copy.deepcopy(whole), mesh_of(me), block_plan(dim))


def autocast(me: Rank, dim: int | None) -> None:
    """Every linear layer computes in bfloat16 in the forward and in the backward pass, as in the whole model."""
    whole, model = parallel(me, dim, torch.float32)
    x = values((2, 4, WIDTH)).float()
    ys = []
    for module, mine in ((whole, x), (model, part(me, x, layout(dim)))):
        dtypes: list[torch.dtype] = []
        for name in ("attention.q", "attention.o", "ffn.gate"):
            module.get_submodule(name).register_forward_hook(lambda module, args, y, to=dtypes: to.append(y.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            y = module(mine)
        assert dtypes == [torch.bfloat16] * 3
        y.float().square().sum().backward()
        ys.append(y)
    torch.testing.assert_close(ys[1], part(me, ys[0], layout(dim)), rtol=0.05, atol=0.05)
    assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in model.parameters())
    found, expected = (
        torch.cat([full(one.grad).flatten() for one in module.parameters()]) for module in (model, whole)
    )
    assert (found - expected).norm() < 0.02 * expected.norm(), "a bfloat16 has eight significant bits"


@pytest.mark.parametrize("dim", LAYOUTS)
def test_autocast(ranks: Pool, dim: int | None) -> None:
    ranks.run(2, autocast, dim)


def no_gradients(me: Rank, dim: int | None) -> None:
    whole, model = parallel(me, dim)
    x = values((2, 4, WIDTH))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = model(part(me, x, layout(dim)))
            assert not y.requires_grad
            torch.testing.assert_close(y, part(me, whole(x), layout(dim)), **EXACT)


@pytest.mark.parametrize("dim", LAYOUTS)
def test_without_gradients(ranks: Pool, dim: int | None) -> None:
    ranks.run(2, no_gradients, dim)


def frozen(me: Rank, dim: int | None) -> None:
    """Some weights, some biases and the input have no gradient, as when adapters are trained."""
    torch.manual_seed(0)
    whole = Block().double()
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name in ("attention.q.weight", "attention.k.bias", "norm2.weight", "ffn.down.bias"))

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(module, mesh, block_plan(dim))

    equals_whole(me, whole, parallelize, values((2, 4, WIDTH)), layout(dim), layout(dim))


@pytest.mark.parametrize("dim", LAYOUTS)
def test_frozen_parameters(ranks: Pool, dim: int | None) -> None:
    ranks.run(2, frozen, dim)


def kept(me: Rank, dim: int | None, frozen: bool) -> list[tuple[int, ...]]:
    """Return the shapes of the activations that an MLP keeps for its backward pass."""
    model = parallelize_module(MLP(bias=False), mesh_of(me), mlp_plan(layout(dim), layout(dim)))
    model.requires_grad_(not frozen)
    weights = {full_or_local(weight).untyped_storage().data_ptr() for weight in model.parameters()}
    found = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            found.append(tuple(tensor.shape))
        return tensor

    x = torch.ones(2, 4 if dim is None else 4 // me.world, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    y.sum().backward()
    return found


def full_or_local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


@pytest.mark.parametrize("dim", LAYOUTS)
def test_frozen_layers_keep_no_activations(ranks: Pool, dim: int | None) -> None:
    of_tanh = [(2, 4, HIDDEN // 2)]
    for found in ranks.run(2, kept, dim, True):
        assert found == of_tanh
    for found in ranks.run(2, kept, dim, False):
        assert len(found) == 3


def lanes(me: Rank, dim: int | None) -> set[int]:
    """Return the lanes of a backward pass. It runs outside the ``lane`` block in which the forward pass ran."""
    _, model = parallel(me, dim)
    x = part(me, values((2, 4, WIDTH)), layout(dim)).clone().requires_grad_()
    with symm_overlap.lane(3):
        y = model(x)
    used: list[int] = []
    original = Call.__init__

    def recording(self: Call, peers: Any, *args: Any, **kwargs: Any) -> None:
        used.append(peers.settings.lane_index)
        original(self, peers, *args, **kwargs)

    Call.__init__ = recording  # type: ignore[method-assign]
    try:
        y.sum().backward()
    finally:
        Call.__init__ = original  # type: ignore[method-assign]
    assert len(used) > 1
    return set(used)


@pytest.mark.parametrize("dim", LAYOUTS)
def test_a_backward_pass_uses_the_lane_of_its_forward_pass(ranks: Pool, dim: int | None) -> None:
    assert ranks.run(2, lanes, dim) == [{3}, {3}]


def data_parallel(me: Rank) -> None:
    """FSDP2 over two groups of two ranks. Every group computes its own batch, and the gradients are averaged."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dim in LAYOUTS:
        for each in (False, True):  # whether FSDP gathers every linear layer separately, when it runs
            data_parallel_block(mesh, dim, each)


def data_parallel_block(mesh: DeviceMesh, dim: int | None, each: bool) -> None:
    torch.manual_seed(0)
    whole = Block().double()
    model = parallelize_module(copy.deepcopy(whole), mesh["tp"], block_plan(dim))
    for module in model.modules():
        if each and isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    batches = [values((2, 4, WIDTH), seed) for seed in (1, 2)]
    mine = batches[mesh.get_local_rank("dp")]
    x = mine if dim is None else mine.chunk(2, dim)[mesh.get_local_rank("tp")]
    for _ in range(2):
        with choices() as calls:
            y = model(x)
        y.square().sum().backward()
        gathers = [op for op, _ in calls].count("all_gather_matmul")
        assert gathers == (0 if each or dim is None else 2), "a product needs a weight that is not gathered"
    for batch in batches * 2:
        (whole(batch).square().sum() / 2).backward()
    same_gradients(model, whole, **EXACT)


UNSHARDED = ("after a forward without gradients", "in a checkpoint", "by accumulation", "by hand")


def unsharded_ahead(me: Rank) -> None:
    """FSDP gathers every linear layer separately, but their weights are there already when the module begins."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for how in UNSHARDED:
        for linears in (None, ["q", "k", "v"]):
            weights_are_there(mesh, how, linears)


def weights_are_there(mesh: DeviceMesh, how: str, linears: list[str] | None) -> None:
    torch.manual_seed(0)
    whole = Block().double()
    plan = block_plan(1)
    plan["attention"] = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True, linears=linears
    )
    model = parallelize_module(copy.deepcopy(whole), mesh["tp"], plan)
    keeps = how in ("after a forward without gradients", "in a checkpoint")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=not keeps)
    fully_shard(model, mesh=mesh["dp"])
    batches = [values((2, 4, WIDTH), seed) for seed in (1, 2)]
    x = batches[mesh.get_local_rank("dp")].chunk(2, 1)[mesh.get_local_rank("tp")].clone().requires_grad_()
    passes = 1
    if keeps:
        with torch.no_grad():
            model(x)
    elif how == "by accumulation":
        passes = 2
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        model(x).square().sum().backward()
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
    else:
        for name in ("q", "k", "v"):
            model.attention.get_submodule(name).unshard()
    y = checkpoint(model, x, use_reentrant=False) if how == "in a checkpoint" else model(x)
    y.square().sum().backward()
    for batch in batches * passes:
        (whole(batch).square().sum() / 2).backward()
    same_gradients(model, whole, **EXACT)


def test_fsdp_reduces_gradients_of_weights_that_were_gathered_ahead(fresh_ranks: Any) -> None:
    fresh_ranks(4).run(4, unsharded_ahead)


def in_inference_mode(me: Rank) -> None:
    """The weights were created in inference mode, in which tensors do not count how often they are written to."""
    with torch.inference_mode():
        whole, model = parallel(me, 1)
    x = values((2, 4, WIDTH))
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(model(part(me, x, Shard(1))), part(me, whole(x), Shard(1)), **EXACT)


def test_weights_of_inference_mode(ranks: Pool) -> None:
    ranks.run(2, in_inference_mode)


def test_fsdp_on_the_other_dimension_of_a_mesh(fresh_ranks: Any) -> None:
    fresh_ranks(4).run(4, data_parallel)


def one_row(me: Rank) -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()
    x = values((4,)).requires_grad_()
    mesh = mesh_of(me)
    layers = ColumnParallelLinear.from_linear(up, mesh=mesh), RowParallelLinear.from_linear(down, mesh=mesh)
    gradients = []
    for one, other in ((up, down), layers):
        y: Tensor = other(one(x))
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        gradients.append((y.detach(), gradient))
    torch.testing.assert_close(gradients[1], gradients[0], **EXACT)


def test_an_input_of_one_dimension(ranks: Pool) -> None:
    ranks.run(2, one_row)
