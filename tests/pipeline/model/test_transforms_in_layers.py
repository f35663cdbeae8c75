"""Layers whose forward uses autograd, transforms of torch.func, torch.compile or operators of higher order. While a
model is traced, its layers run below an operator, where torch would leave all of these out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from symm_overlap.pipeline.model import PipelineModel
from tests.pipeline.model.models import WIDTH, mean_square, reals
from tests.pipeline.model.reference import EXACT, same_gradients, whole_step
from tests.ranks import Pool, Rank

Compute = Callable[[nn.Module, Tensor], Tensor]


def vmapped(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(linear)(x)


def outer_products(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.outer(row, row).sum(0))(linear(x))


def gradient_of_its_own(linear: nn.Module, x: Tensor) -> Tensor:
    """As a force is the gradient of an energy."""
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(linear(at).square().sum(), at, create_graph=True)
    return linear(x) + gradient


def functional_gradient(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) + torch.func.grad(lambda at: linear(at).square().sum())(x)


def jacobians(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) + torch.vmap(torch.func.jacrev(torch.tanh))(x).sum(1)


def condition(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: linear(x), lambda x: 2 * x, (x,))


def compiled(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.compile(lambda x: linear(x).tanh(), backend="eager", fullgraph=True)(x)


TRAINED = [vmapped, outer_products, gradient_of_its_own, functional_gradient, jacobians, condition, compiled]


class Layer(nn.Module):
    def __init__(self, compute: Compute, width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(width, width), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.linear, x)


def model(compute: Compute, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(compute, width) for _ in range(4)))


def train(me: Rank, compute: Compute) -> None:
    torch._dynamo.reset()
    whole, batch = model(compute).double(), {"input": reals(8, WIDTH), "target": reals(8, WIDTH, seed=1)}
    options = {"loss": mean_square}
    pipe = PipelineModel(copy.deepcopy(whole), num_microbatches=2, group=me.group, **options)
    loss, expected = pipe.run_train(**batch), whole_step(whole, batch, options, 2)
    if loss is not None:
        torch.testing.assert_close(loss, expected, **EXACT)
    same_gradients(pipe, whole)


@pytest.mark.parametrize("compute", TRAINED)
def test_they_train_like_the_whole(ranks: Pool, compute: Compute) -> None:
    ranks.run(2, train, compute)


def attention(linear: nn.Module, x: Tensor) -> Tensor:
    """On a CPU torch has no backward of this operator."""
    q = linear(x)[:, None]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, x.shape[1], x.shape[1], device="cpu")
    return flex_attention(q, q, q, block_mask=mask)[:, 0]


def evaluate(me: Rank) -> None:
    torch._dynamo.reset()
    warnings.simplefilter("ignore")  # torch says that flex_attention should be compiled
    whole, x = model(attention, 16).requires_grad_(False), torch.randn(4, 128, 16)
    pipe = PipelineModel(copy.deepcopy(whole), num_microbatches=2, loss=lambda y: y.mean(), target=None, group=me.group)
    found = pipe.eval().run_eval(input=x)
    if found is not None:
        torch.testing.assert_close(found, whole(x))


def test_flex_attention_is_traced(ranks: Pool) -> None:
    ranks.run(2, evaluate)
