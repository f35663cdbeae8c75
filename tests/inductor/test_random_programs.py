"""Random programs of collectives, matmuls, views and pointwise operations. Compiled with the pass, they compute the
same as without it, in the forward and backward pass, and with the same strides."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor_autograd,
)

import symm_overlap
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from tests.inductor.tracing import compiled_up_to_the_pass
from tests.ranks import Pool, Rank
from tests.transforms import comparing

Instruction = tuple[str, int, int]  # what to do, which earlier value to do it to, and a number that selects a variant
INSTRUCTIONS = [
    "matmul",
    "bias",
    "bmm",
    "gradient",
    "gather",
    "scatter",
    "reduce",
    "add",
    "view",
    "pointwise",
    "chunks",
    "single",
    "gather matmul",
    "gather gradient",
    "matmul scatter",
    "bias reduce",
    "bmm scatter",
    "matmul single reduce",
    "cast",
    "gather cast matmul",
    "gather cast gradient",
    "matmul cast scatter",
    "halves scatter",
    "halves chunks scatter",
    "halves reduce",
]
MOST_ELEMENTS = 3000

programs = st.lists(
    st.tuples(st.sampled_from(INSTRUCTIONS), st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=12
)


class Total(torch.autograd.Function):
    """The sum over ranks. Every rank has its own gradient of the sum, and the gradient of the input is their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].contiguous(), "sum", ctx.group), None


class Inputs:
    """Creates the tensors that a program requests. Every run gets the same tensors in the same order."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.next = 0

    def __call__(self, *shape: int) -> Tensor:
        if self.next == len(self.made):
            generator = torch.Generator().manual_seed(self.next)
            self.made.append(torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_())
        self.next += 1
        return self.made[self.next - 1]


def run(program: list[Instruction], group: dist.ProcessGroup, new: Callable[..., Tensor]) -> list[Tensor]:
    """Run the instructions and return some of the values. An instruction that does not fit its value does nothing."""
    rows = 2 * group.size() ** 2
    values = [new(rows, 4), new(2, rows // 2, 4)]
    for what, which, how in program:
        x = values[-1 - which % min(3, len(values))]
        for part in what.split():
            made = change(part, x, how, values, group, lambda *shape, like=x: new(*shape).to(like.dtype))
            x = x if made is None else made
        if x.numel() <= MOST_ELEMENTS:
            values.append(x)
    return [values[-1], *values[2:-1:3]]


def change(
    what: str, x: Tensor, how: int, values: list[Tensor], group: dist.ProcessGroup, new: Callable[..., Tensor]
) -> Tensor | None:
    world, dim = group.size(), how % x.dim()
    flat, width = x.reshape(-1, x.shape[-1]), (4, 2 * world)[how % 2]
    if what == "matmul":
        return (flat @ new(x.shape[-1], width)).view(*x.shape[:-1], width)
    if what == "bias":
        bias = new(width) if how % 3 else new(flat.shape[0], width)
        return torch.addmm(bias, flat, new(x.shape[-1], width)).view(*x.shape[:-1], width)
    if what == "bmm" and x.dim() == 3:
        return torch.bmm(x, new(x.shape[-1], width).expand(x.shape[0], -1, -1))
    if what == "gradient":
        return flat.t() @ new(flat.shape[0], width) if how % 2 else new(width, flat.shape[0]) @ flat
    if what == "gather" and x.numel() * world <= MOST_ELEMENTS:
        return all_gather_tensor_autograd(x.contiguous(), dim, group)
    if what == "scatter" and x.shape[dim] % world == 0:
        return reduce_scatter_tensor_autograd(x.contiguous(), "sum", dim, group)
    if what == "cast":
        return x.double() if x.dtype == torch.float32 and how % 3 else x.float()
    if what == "halves":  # as under autocast
        products = [flat.bfloat16() @ new(x.shape[-1], width).bfloat16() for _ in range(1 + how % 3)]
        total = sum(map(Tensor.float, products)) if how % 2 else sum(products[1:], products[0]).float()
        return total.view(*x.shape[:-1], width)  # type: ignore[union-attr]
    if what == "reduce":
        return Total.apply(x.contiguous(), group)  # type: ignore[no-any-return, no-untyped-call]
    if what == "add":
        same = [value for value in values if value.shape == x.shape and value is not x]
        return x + same[how % len(same)] if same else None
    if what == "view" and x.dim() == 3:
        return (x.flatten(0, 1), x.transpose(0, 1), x.permute(2, 0, 1), x.flatten(1, 2))[how % 4]
    if what == "view" and x.dim() == 2 and x.shape[0] % 2 == 0:
        return (x.view(2, -1, x.shape[1]), x.t(), x.unflatten(0, (-1, 2)))[how % 3] if x.is_contiguous() else x.t()
    if what == "pointwise":
        return (x.relu(), x * 0.5, x.sin(), x.clone())[how % 4]
    if what == "single":
        return (x.unsqueeze(dim).select(dim, 0), x.unsqueeze(dim).squeeze(), x[: how % 9 + 1], x.narrow(dim, 0, 1))[
            how % 4
        ]
    if what == "chunks" and x.shape[dim] % world == 0:
        chunks = x.chunk(world, dim)
        return torch.cat(chunks if how % 3 else chunks[::-1], how // 3 % x.dim())
    return None


def near(one: Tensor, other: Tensor, allowed: float) -> bool:
    """True if two results differ by rounding only. If something was cast to fewer bits, the loss may multiply the
    rounding of single elements, so the whole tensors are compared.
    """
    if allowed:
        return bool((one - other).detach().norm() <= allowed * one.detach().norm() + 1e-6)
    return torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def strides(tensor: Tensor) -> list[int]:
    """Return the strides of the dimensions that have one: torch.compile changes those of dimensions of size 1."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def difference(me: Rank, program: list[Instruction]) -> tuple[str, int]:
    """Return how the compiled program differs from the eager one ("" if not), and how many collectives were fused."""
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    inputs, found = Inputs(), []

    def outputs_from(tensors: list[Tensor]) -> list[Tensor]:
        left = list(tensors)
        return run(program, me.group, lambda *shape: left.pop(0))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(program, me.group, inputs)
    halves = any("halves" in what for what, *_ in program)
    allowed = 0.05 if halves else 0.02 if any("cast" in what for what, *_ in program) else 0.0
    compiled = compiled_up_to_the_pass(outputs_from, OverlapPass(Choices()))
    for function in (outputs_from, compiled):
        tensors = [tensor.detach().clone().requires_grad_() for tensor in inputs.made]
        with warnings.catch_warnings(), comparing(False):
            warnings.simplefilter("ignore")
            outputs = function(tensors)
            # With bfloat16, a cosine would multiply the rounding too often. A plain sum has an expanded gradient, with
            # which torch 2.11 cannot differentiate a reduce-scatter.
            losses = [(output * (torch.ones_like(output) if halves else math.pi)) for output in outputs]
            losses = [loss.sum() if halves else loss.cos().sum() for loss in losses]
            total = sum(losses, torch.zeros((), dtype=torch.float64))
            if total.requires_grad:
                total.backward()
        found.append([*outputs, *(tensor.grad for tensor in tensors)])
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        if (one is None) != (other is None):
            return f"tensor {number}: {one} and {other}", 0
        if one is None:
            continue
        if one.shape != other.shape or one.dtype != other.dtype or not near(one, other, allowed):
            return f"tensor {number}: {one} and {other}", 0
        if number < len(outputs) and strides(one) != strides(other):
            return f"output {number} has strides {one.stride()} and {other.stride()}", 0
    return "", symm_overlap.inductor.report().fused


@pytest.mark.slow
def test_random_programs_compute_the_same_as_before(ranks: Pool) -> None:
    fused: list[int] = []

    @settings(
        max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(program=programs)
    def check(program: list[Instruction]) -> None:
        found = ranks.run(2, difference, program, timeout=120)
        assert [text for text, _ in found] == ["", ""]
        assert found[0] == found[1], "every rank fuses the same"
        fused.append(found[0][1])

    check()
    assert sum(fused) >= 5, "with fewer fused collectives, the programs hardly test the pass"
