"""Parallel styles under torch.compile, with and without the pass of `symm_overlap.inductor`."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap.nn import ColwiseParallel, RowwiseParallel
from tests.nn.blocks import MLP, WIDTH, Block, SwiGLU, block_plan, mlp_plan, whole
from tests.nn.reference import mesh_of, same_gradients, values, weighted
from tests.ranks import Pool, Rank
from tests.transforms import choices, comparing


class FeedForward(nn.Module):
    """A block without attention, which torch 2.13 cannot compile in a checkpoint if parameters are DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2, self.ffn = nn.RMSNorm(WIDTH), SwiGLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm2(x))


def feed_forward_plan(dim: int | None) -> dict[str, object]:
    return {name: style for name, style in block_plan(dim).items() if name.startswith(("norm2", "ffn"))}


MODELS = {"block": Block, "feed forward": FeedForward, "MLP": MLP}
PLANS = {"block": block_plan, "feed forward": feed_forward_plan, "MLP": lambda dim: mlp_plan(Shard(dim), Shard(dim))}


def step(model: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the input and of every parameter."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x * 1)  # a copy, because modules may write to it
    y.backward(torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin())
    return [y.detach(), x.grad, *(local(parameter.grad) for parameter in module.parameters())]  # type: ignore[list-item]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compiled(
    me: Rank, name: str, dim: int | None, checkpoint: bool = False, **options: Any
) -> tuple[list[str], list[str]]:
    """Compile a model, compare it with itself in eager mode, and return the ops that one step calls in eager mode
    without a checkpoint, and in compiled code.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = parallelize_module(MODELS[name](), mesh_of(me), PLANS[name](dim))
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0 if dim is None else me.rank))
    with comparing(False):
        with choices() as eager:
            expected = step(module, module, x)
        if checkpoint:
            module = checkpoint_wrapper(module, preserve_rng_state=False)
        model = torch.compile(module, fullgraph=True, **options)
        with choices() as calls:
            for one, other in zip(step(model, module, x), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    if not checkpoint:  # with checkpoints, the compiler repeats only the ops that the backward pass needs
        assert sorted(op for op, _ in calls) == sorted(op for op, _ in eager)
    return [op for op, _ in eager], [op for op, _ in calls]


DIMS = pytest.mark.parametrize(
    "dim", [pytest.param(1, id="sequence parallel"), pytest.param(None, id="replicated", marks=pytest.mark.slow)]
)


@DIMS
def test_a_compiled_block_is_one_graph_with_the_calls_of_eager_mode(ranks: Pool, dim: int | None) -> None:
    ranks.run(2, compiled, "block", dim, backend="aot_eager", timeout=120)


@pytest.mark.slow
@DIMS
def test_it_may_be_checkpointed(ranks: Pool, dim: int | None) -> None:
    calls = ranks.run(2, compiled, "feed forward", dim, True, backend="aot_eager", timeout=120)[0]
    once, again = map(Counter, calls)
    # The backward pass repeats one gather, which both layers share. It does not repeat a sum of the forward pass.
    assert again - once == (Counter(all_gather_matmul=1) if dim == 1 else Counter())
    assert not once - again


def without_gradients(me: Rank, dim: int | None) -> None:
    """Compile a block in no_grad, and the part of it without attention in inference mode, and with frozen parameters
    and an input without a gradient.
    """
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0 if dim is None else me.rank))
    with comparing(False):
        for name, frozen, mode in (
            ("block", False, torch.no_grad()),
            ("feed forward", False, torch.inference_mode()),
            ("feed forward", True, nullcontext()),
        ):
            torch._dynamo.reset()
            torch.manual_seed(0)
            module = parallelize_module(MODELS[name](), mesh_of(me), PLANS[name](dim)).requires_grad_(not frozen)
            with mode:
                found = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
                assert not found.requires_grad
                torch.testing.assert_close(found, module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@DIMS
def test_a_block_compiles_without_gradients(ranks: Pool, dim: int | None) -> None:
    ranks.run(2, without_gradients, dim, timeout=120)


def behind_an_embedding(me: Rank, style: type[ColwiseParallel] | type[RowwiseParallel]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH))
    embedding = style(input_layouts=Replicate(), output_layouts=Replicate())
    plan = {"0": embedding, "1": ColwiseParallel(output_layouts=Replicate())}
    module = parallelize_module(copy.deepcopy(whole), mesh_of(me), plan)
    module[1].compile(backend="aot_eager")
    ids = torch.arange(8).view(2, 4)
    weights = values((2, 4, WIDTH)).float()
    for model in (module, whole):
        weighted(model(ids), weights).backward()
    same_gradients(module, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_a_layer_that_is_compiled_alone_passes_its_gradient_on_to_the_embedding(ranks: Pool, style: Any) -> None:
    ranks.run(2, behind_an_embedding, style, timeout=120)


class WritesToItsInput(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class WritesBehindABreak(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x.mul_(2))


def written_to(me: Rank, model: type[nn.Module], dim: int | None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plan = {"": whole(dim), "gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    module = parallelize_module(model(), mesh_of(me), plan)
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0 if dim is None else me.rank))
    with comparing(False):
        expected = step(module, module, x)
        try:
            found = step(torch.compile(module, backend="aot_eager"), module, x)
        except Exception as error:
            if "is being modified inplace" not in str(error):
                raise
            return
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("model", "dim"),
    [
        (WritesToItsInput, 1),
        pytest.param(WritesBehindABreak, 1, marks=pytest.mark.slow),
        pytest.param(WritesBehindABreak, None, marks=pytest.mark.slow),  # the input is replicated
    ],
)
def test_a_compiled_module_that_writes_to_its_shared_input_raises_or_is_right(
    ranks: Pool, model: type[nn.Module], dim: int | None
) -> None:
    ranks.run(2, written_to, model, dim, timeout=120)
