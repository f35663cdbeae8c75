"""What the compiler saves for the backward pass has the strides that torch expects, if sizes are symbolic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

import symm_overlap
from tests.ranks import Pool, Rank

WIDTH, HEAD = 16, 4


def train_several_lengths(me: Rank) -> None:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    torch.manual_seed(0)
    qkv = torch.randn(WIDTH, 3 * WIDTH // me.world, requires_grad=True)
    out = torch.randn(WIDTH // me.world, WIDTH, requires_grad=True)

    def attention(x: Tensor) -> Tensor:
        """Attention whose projections are one matmul. Its results are views of one product."""
        x = all_gather_tensor_autograd(x, 1, me.group)
        q, k, v = ((x @ qkv).unflatten(2, (3, -1, HEAD)).select(2, part).transpose(1, 2) for part in range(3))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return reduce_scatter_tensor_autograd(y @ out, "sum", 1, me.group)

    # In float32, since torch 2.11 compiles no backward of attention in float64 that runs on CPUs.
    compiled = torch.compile(attention, options=symm_overlap.inductor.options(strict=True))
    for length in (3, 4, 2):
        results = []
        x = torch.randn(2, length, WIDTH)
        torch._dynamo.mark_dynamic(x, 1)
        for run in (compiled, attention):
            qkv.grad = out.grad = None
            y = run(x)
            y.square().sum().backward()
            results.append([y.detach(), qkv.grad, out.grad])
        for one, other in zip(*results, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.slow
def test_attention_with_one_projection_trains_with_several_lengths(ranks: Pool) -> None:
    ranks.run(2, train_several_lengths, timeout=240)
