"""Parallel styles under torch.compile, with and without the pass of `symm_overlap.inductor`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import symm_overlap
from symm_overlap.nn import ColwiseParallel, RowwiseParallel
from tests.nn.blocks import MLP, WIDTH, Block, SwiGLU, block_plan, mlp_plan, whole
from tests.nn.reference import mesh_of
from tests.ranks import Pool, Rank
from tests.transforms import choices, comparing

MODELS = {"block": Block, "MLP": MLP}
PLANS = {"block": block_plan, "MLP": lambda dim: mlp_plan(Shard(dim), Shard(dim))}


def step(model: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin())
    return [y.detach(), x.grad, *(local(parameter.grad) for parameter in module.parameters())]  # type: ignore[list-item]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compiled(me: Rank, name: str, dim: int | None, **options: Any) -> list[str]:
    """Compiles a model, compares it with itself in eager mode, and returns the ops that one step calls."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = parallelize_module(MODELS[name](), mesh_of(me), PLANS[name](dim))
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0 if dim is None else me.rank))
    with comparing(False):
        with choices() as eager:
            expected = step(module, module, x)
        model = torch.compile(module, fullgraph=True, **options)
        with choices() as calls:
            for one, other in zip(step(model, module, x), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert sorted(op for op, _ in calls) == sorted(op for op, _ in eager)
    return [op for op, _ in calls]


@pytest.mark.parametrize("dim", [1, None], ids=["sequence parallel", "replicated"])
def test_a_compiled_block_is_one_graph_with_the_calls_of_eager_mode(ranks: Pool, dim: int | None) -> None:
    calls = ranks.run(2, compiled, "block", dim, backend="aot_eager", timeout=120)
    print(calls)


class WritesToItsInput(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def written_to(me: Rank) -> None:
    for given in (Shard(1), Replicate()):
        torch._dynamo.reset()
        plan = {"": whole(1 if given == Shard(1) else None), "gate": ColwiseParallel(), "up": ColwiseParallel()}
        module = parallelize_module(WritesToItsInput(), mesh_of(me), {**plan, "down": RowwiseParallel()})
        x = torch.ones(2, 4, WIDTH, requires_grad=True)
        module(x * 1)
        with pytest.raises(Exception, match="is being modified inplace"):
            torch.compile(module, backend="aot_eager")(x * 1)


def test_a_compiled_module_that_writes_to_its_shared_input_raises(ranks: Pool) -> None:
    ranks.run(2, written_to, timeout=120)


def with_the_pass(me: Rank, folder: str) -> list[str]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    return compiled(me, "MLP", 1, options=symm_overlap.inductor.options())


@pytest.mark.slow
def test_the_pass_for_compiled_models_leaves_the_styles_as_they_are(ranks: Pool, tmp_path: Any) -> None:
    print(ranks.run(2, with_the_pass, str(tmp_path), timeout=120))
