"""Layers that use float8 matmuls in the backward pass too. The gradients of the input of q, k and v are scaled
products, which are summed and sent in one exchange.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

import symm_overlap
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from tests.inductor.test_random_programs import Total
from tests.inductor.tracing import compiled_up_to_the_pass
from tests.ranks import Pool, Rank
from tests.transforms import comparing

WIDTH = 16


class Float8(torch.autograd.Function):
    """Compute ``x @ weight.t()`` in bfloat16 from float8 numbers. The gradient of ``x`` is also a float8 product, but
    the gradient of the weight is not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t(), torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return product(grads[0], weight, torch.float8_e5m2), grads[0].t() @ x


def product(A: Tensor, B: Tensor, dtype: torch.dtype) -> Tensor:
    right = B.t().contiguous().to(torch.float8_e4m3fn).t()
    scale = torch.full((), 0.5)
    return torch._scaled_mm(A.to(dtype), right, scale, 2 * scale, out_dtype=torch.bfloat16)


class QKV(nn.Module):
    """Query, key and value layers. With sequence parallelism, a rank's input and output are shards of the rows.
    Otherwise, every rank has them whole.
    """

    def __init__(self, group: Any, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weights = nn.ParameterList(torch.randint(-3, 4, (WIDTH, WIDTH)).bfloat16() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gathered = self.sequence_parallel
        whole = all_gather_tensor_autograd(x, 0, self.group) if gathered else Summed.apply(x, self.group)
        q, k, v = (Float8.apply(whole, weight) for weight in self.weights)
        total = (q > 0) * k + v + q
        if gathered:
            return reduce_scatter_tensor_autograd(total, "sum", 0, self.group)
        return Total.apply(total, self.group)


class Summed(torch.autograd.Function):
    """Return the input, which every rank has whole. Its gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return Total.apply(grads[0], ctx.group), None


def gradients(me: Rank, sequence_parallel: bool) -> list[tuple[str, int]]:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    torch.manual_seed(me.rank)
    module = QKV(me.group, sequence_parallel)
    x = torch.randint(-3, 4, (6, WIDTH)).bfloat16().requires_grad_()
    compiled, results = compiled_up_to_the_pass(module, OverlapPass(Choices())), []
    for function in (compiled, module):
        with comparing(False):
            y = function(x)
            results.append([y, *torch.autograd.grad((y * y.detach().sign()).sum(), [x, *module.parameters()])])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert one.any()
    _, backward = symm_overlap.inductor.report().graphs
    return [(site.collective, site.matmuls) for site in backward.sites if site.matmuls == 3]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_of_q_k_and_v_are_one_op(ranks: Pool, sequence_parallel: bool) -> None:
    collective = "reduce_scatter_tensor" if sequence_parallel else "all_reduce"
    assert ranks.run(2, gradients, sequence_parallel, timeout=120) == [[(collective, 3)]] * 2
