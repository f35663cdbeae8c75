"""Products with a bias keep the bits of ``addmm``, which rounds once, whatever the pass makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.inductor.tracing import overlapped, traced
from tests.ranks import Pool, Rank
from tests.transforms import comparing

from .cases import gather, reduce, scatter

MOST = {torch.bfloat16: 256, torch.float16: 2048}
"""The next whole number is rounded to this one. With 1 added before it is rounded, it is 2 more."""


def gathered(me: Rank, x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    whole = gather(x, me.world, me.group_name)
    return [torch.addmm(bias, whole, w), whole @ w, torch.addmm(bias + 1, whole, w)]


def gathered_once(me: Rank, x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    return [torch.addmm(bias, gather(x, me.world, me.group_name), w)]


def gathered_and_added(me: Rank, x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    """A sum that no collective reduces is rounded where the program rounds it."""
    return [gather(x, me.world, me.group_name) @ w + bias]


def scattered(me: Rank, x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    return [scatter(torch.addmm(bias, x, w), me.world, me.group_name, "avg")]


def summed(me: Rank, x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    total = torch.addmm(bias, x, w).float() + torch.addmm(bias, x, w).float()
    return [scatter(total, me.world, me.group_name, "avg")]


def kept(me: Rank, x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    product, other = torch.addmm(bias, x, w), torch.addmm(bias, x, w)
    return [scatter(product + other, me.world, me.group_name, "avg"), other]


def reduced(me: Rank, x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    return [reduce(torch.addmm(bias, x, w), me.group_name, "avg")]


BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
PROGRAMS = [
    (gathered, 3, BFLOAT16),
    (gathered_once, 1, FLOAT16),
    (gathered_and_added, 1, BFLOAT16),
    (scattered, 1, BFLOAT16),
    (summed, 2, BFLOAT16),
    (kept, 2, FLOAT16),
    (reduced, 1, BFLOAT16),
]


def same_bits(me: Rank, program: Callable[..., Any], matmuls: int, dtype: torch.dtype) -> None:
    most = MOST[dtype]
    x = torch.tensor([[most, 1]], dtype=dtype).repeat(2 * me.world, 1)
    w, bias = torch.ones(2, 3, dtype=dtype), torch.tensor([1, 2, 3], dtype=dtype)
    inputs = [x, w, bias]

    def run(world: int, name: str, new: Callable[..., Tensor]) -> Any:
        return program(me, *(new(*each.shape) for each in inputs))

    graph = traced(run, me.world, me.group_name, inputs)
    changed, report = overlapped(graph)
    (site,) = report.sites
    assert f"fused with {matmuls} matmul" in str(site)
    expected = [each.clone() for each in graph(*inputs)]
    assert any(most + 2 in each.tolist()[0] for each in expected) or program in (summed, kept, gathered_and_added)
    with comparing(False):
        found = changed(*inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("program", "matmuls", "dtype"), PROGRAMS, ids=[each[0].__name__ for each in PROGRAMS])
def test_a_bias_is_rounded_with_its_product(
    ranks: Pool, program: Callable[..., Any], matmuls: int, dtype: torch.dtype
) -> None:
    ranks.run(2, same_bits, program, matmuls, dtype)
