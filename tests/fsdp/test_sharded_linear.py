"""A model with sharded linear layers has the losses, gradients and parameters of the plain model in float64."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import symm_overlap
from symm_overlap.fsdp import ShardedLinear, shard_linears
from tests.collective import reference as ref
from tests.fsdp.parity import (
    F64,
    Block,
    average_gradients,
    block,
    pair,
    same_gradients,
    same_parameters,
    targets,
    tokens,
    whole,
)
from tests.ranks import Pool, Rank

# Path and chunks, the optimizer, the dimension that is sharded, and whether the forward is recomputed in backward.
WAYS = [
    (None, None, torch.optim.Adam, 0, False),
    ("pipelined", 2, torch.optim.SGD, 1, True),
    ("c10d", 2, torch.optim.SGD, 0, False),
]


def loss_of(model: nn.Module, me: Rank, step: int, rows: int, again: bool) -> Tensor:
    inputs = tokens(me, step, rows)
    output = checkpoint(model, inputs, use_reentrant=False) if again else model(inputs)
    # The sum is divided by a number that all ranks share, so that a rank without rows has a loss too.
    return (output - targets(me, step, rows)).square().sum() / 30


def steps(me: Rank, optimizer: type[torch.optim.Optimizer], shard_dim: int, again: bool) -> None:
    """Train several steps of two accumulated batches. Ranks have different numbers of rows, and one may have none."""
    plain, sharded = pair(me, shard_dim)
    by = [optimizer(model.parameters(), lr=0.05) for model in (plain, sharded)]
    for step in range(3):
        losses = []
        for model, optim in zip((plain, sharded), by, strict=True):
            optim.zero_grad()
            total = 0.0
            for number in range(2):
                rows = (me.rank + step + number) % 4
                loss = loss_of(model, me, 2 * step + number, rows, again and model is sharded)
                loss.backward()
                total += float(loss)
            average_gradients(me, model.parameters())
            losses.append(total)
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
        same_gradients(plain, sharded)
        for optim in by:
            optim.step()
        same_parameters(plain, sharded)


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_are_those_of_averaged_gradients(ranks: Pool, world: int) -> None:
    ranks.run(world, all_steps)


def all_steps(me: Rank) -> None:
    for path, chunks, optimizer, shard_dim, again in WAYS[: 3 if me.world > 1 else 1]:
        with symm_overlap.force_path(path, chunks=chunks):
            steps(me, optimizer, shard_dim, again)


def clip(model: nn.Module, sharded: set[str]) -> float:
    """Clip the gradients of the sharded parameters only: torch cannot clip DTensors and plain tensors in one call."""
    norm = nn.utils.clip_grad_norm_([each for name, each in model.named_parameters() if name in sharded], 0.1)
    return float(whole(norm))


def beside_ddp(me: Rank) -> None:
    """DDP averages the gradients that are not sharded, and leaves the shards alone."""
    plain, sharded = pair(me, 0)
    models = [DistributedDataParallel(model, process_group=me.group) for model in (plain, sharded)]
    by = [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]
    shards = {name for name, each in sharded.named_parameters() if isinstance(each, DTensor)}
    for step in range(3):
        for model, optim in zip(models, by, strict=True):
            optim.zero_grad()
            loss_of(model, me, step, 2, False).backward()
        same_gradients(plain, sharded)
        norms = [clip(model, shards) for model in (plain, sharded)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-12)
        for optim in by:
            optim.step()
        same_parameters(plain, sharded)


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_takes_care_of_the_rest_of_the_model(ranks: Pool, world: int) -> None:
    ranks.run(world, beside_ddp)


def layer_is_linear(me: Rank, shard_dim: int) -> None:
    """Compare inputs of any number of dimensions, with and without bias, also if a rank has no shard."""
    for features, outputs, bias in ((6, 6, True), (5, 7, True), (1, 1, False), (2, 4, True)):
        torch.manual_seed(3)
        linear = nn.Linear(features, outputs, bias, dtype=F64)
        layer = ShardedLinear.from_linear(linear, me.group, shard_dim=shard_dim)
        for lead in ((), (4,), (0,), (2, 3), (2, 1, me.rank)):
            x = ref.normal((*lead, features), F64, seed=me.rank).requires_grad_()
            other = x.detach().clone().requires_grad_()
            y, expected = layer(x), linear(other)
            torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
            for model in (linear, layer):
                model.zero_grad()
            y.square().sum().backward()
            expected.square().sum().backward()
            average_gradients(me, linear.parameters())
            same_gradients(linear, layer)
            torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=1e-12)
            with torch.no_grad():
                torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
                assert not layer(x).requires_grad


@pytest.mark.parametrize("shard_dim", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_layer_computes_what_a_linear_does(ranks: Pool, world: int, shard_dim: int) -> None:
    ranks.run(world, layer_is_linear, shard_dim)


def mean_of_large_gradients(me: Rank) -> None:
    """The sum of the gradients overflows float16, but their mean does not."""
    for shard_dim in (0, 1):
        layer = ShardedLinear(4, 4, group=me.group, shard_dim=shard_dim, dtype=torch.float16)
        layer(torch.full((1, 4), 200.0, dtype=torch.float16)).backward(torch.full((1, 4), 200.0, dtype=torch.float16))
        for parameter, expected in ((layer.weight, 40000.0), (layer.bias, 200.0)):
            assert whole(parameter.grad).unique().tolist() == [expected]


def test_gradients_are_divided_before_they_are_rounded(ranks: Pool) -> None:
    ranks.run(2, mean_of_large_gradients)


def mixed_precision(me: Rank) -> None:
    """Under autocast, shards are gathered in bfloat16 and gradients are added in float32, as in nn.Linear."""
    for shard_dim in (0, 1):
        torch.manual_seed(3)
        linear = nn.Linear(64, 32)
        layer = ShardedLinear.from_linear(linear, me.group, shard_dim=shard_dim)
        exact = copy.deepcopy(linear).double()
        for number in range(2):
            x = ref.normal((16, 64), torch.float32, seed=10 * number + me.rank)
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(x)
            assert y.dtype == torch.bfloat16
            expected = exact(x.double())
            assert ref.relative_error(y.detach(), expected.detach()) < 1e-2
            y.float().square().sum().backward()
            expected.square().sum().backward()
        average_gradients(me, exact.parameters())
        for name, parameter in layer.named_parameters():
            assert parameter.grad.dtype == torch.float32
            grad = dict(exact.named_parameters())[name].grad
            assert ref.relative_error(whole(parameter.grad), grad) < 2e-2


def test_mixed_precision_keeps_float32_shards(ranks: Pool) -> None:
    ranks.run(2, mixed_precision)


class Tied(nn.Module):
    """A model with every kind of layer that `shard_linears` leaves unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.bridge = nn.Linear(4, 6)
        self.bridge.weight = self.head.weight
        self.attention = nn.MultiheadAttention(4, 2)
        self.layer = nn.TransformerEncoderLayer(4, 2, 4)
        self.hooked, self.kept, self.sharded = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = self.sharded
        self.hooked.register_forward_hook(lambda *_: None)
        self.parameter_hooked, self.saved_hooked, self.replaced = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.parameter_hooked.weight.register_post_accumulate_grad_hook(lambda _: None)
        self.saved_hooked.register_state_dict_pre_hook(lambda *_: None)
        self.replaced.forward = MethodType(lambda layer, x: F.linear(x, 2 * layer.weight), self.replaced)


def what_is_left(me: Rank) -> None:
    model = Tied()
    done = shard_linears(model, me.group, choose=lambda name, linear: name != "kept")
    own = "its weight to a kernel of its own in evaluation"
    assert done.sharded == ["sharded", "again"]
    assert model.again is model.sharded
    assert done.left == {
        "head": "it shares a parameter with 'embed'",
        "bridge": "it shares a parameter with 'embed'",
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear, a subclass of nn.Linear",
        "layer.self_attn.out_proj": "it is a NonDynamicallyQuantizableLinear, a subclass of nn.Linear",
        **{f"layer.{each}": f"nn.TransformerEncoderLayer passes {own}" for each in ("linear1", "linear2")},
        **dict.fromkeys(("hooked", "parameter_hooked", "saved_hooked"), "it has hooks, which would be lost"),
        "replaced": "its forward was replaced on the instance, and would be lost",
        "kept": "it was not chosen",
    }
    assert model.head.weight is model.embed.weight
    assert shard_linears(model, me.group).sharded == ["kept"]  # a sharded layer is not an nn.Linear any more
    with pytest.raises(ValueError, match=r"ShardedLinear\.from_linear"):
        shard_linears(nn.Linear(2, 2), me.group)
    with pytest.raises(ValueError, match="shard_dim is 2: allowed are 0"):
        ShardedLinear(2, 2, group=me.group, shard_dim=2)
    linear = nn.Linear(2, 2)
    linear.weight = ShardedLinear(2, 2, group=me.group).weight
    with pytest.raises(TypeError, match="DTensor already"):
        ShardedLinear.from_linear(linear, me.group)
    layer = ShardedLinear(2, 2, group=me.group)
    layer.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TypeError, match="replaced by one that is no DTensor"):
        layer(torch.ones(1, 2))


def test_what_cannot_be_replaced_is_left_with_a_reason(ranks: Pool) -> None:
    ranks.run(2, what_is_left)


def from_meta(me: Rank) -> None:
    mesh = DeviceMesh.from_group(me.group, "cpu")
    with pytest.raises(ValueError, match="pass a DeviceMesh"):
        ShardedLinear(5, 7, group=me.group, device="meta")
    layer = ShardedLinear(5, 7, group=mesh, device="meta")
    assert layer.weight.is_meta
    layer.to_empty(device="cpu")
    torch.manual_seed(8)
    layer.reset_parameters()
    torch.manual_seed(8)
    expected = nn.Linear(5, 7)
    for name, parameter in layer.named_parameters():
        assert torch.equal(whole(parameter), dict(expected.named_parameters())[name])
    x = torch.ones(2, 5)
    torch.testing.assert_close(layer(x), F.linear(x, expected.weight, expected.bias))
    assigned = ShardedLinear(5, 7, group=mesh, device="meta")
    assigned.load_state_dict(expected.state_dict(), assign=True)
    torch.testing.assert_close(assigned(x), layer(x), rtol=0, atol=0)
    assert "in_features=5, out_features=7, bias=True, shard_dim=0, ranks=3" in repr(layer)


def test_a_layer_may_begin_without_memory(ranks: Pool) -> None:
    ranks.run(3, from_meta)


def test_the_model_of_these_tests_has_every_sort_of_layer() -> None:
    model = block()
    assert isinstance(model, Block)
    assert model.tied.weight is model.other.weight
    assert not any(parameter.requires_grad for parameter in model.frozen.parameters())


def penalty(me: Rank) -> None:
    """The loss contains the gradient of the input, so the weights' gradients come from two backward passes."""
    for shard_dim in (0, 1):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).to(F64)
        sharded = copy.deepcopy(plain)
        shard_linears(sharded, me.group, shard_dim=shard_dim)
        inputs = torch.randn(2 + me.rank, 5, dtype=F64, requires_grad=True)
        for model in (plain, sharded):
            loss = torch.tanh(model(inputs)).sum()
            (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
            (loss + gradient.square().sum()).backward()
        average_gradients(me, plain.parameters())
        same_gradients(plain, sharded)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_penalty_on_the_gradient_of_the_input_has_averaged_gradients_too(ranks: Pool, world: int) -> None:
    ranks.run(world, penalty)
