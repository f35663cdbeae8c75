"""Sums over ranks whose result has another dtype than the products, or whose products are added in another one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import symm_overlap
from symm_overlap.collective.ops.matmuls_reduce_scatter import _described
from symm_overlap.collective.sum_dtypes import sent_in, sum_dtypes
from tests.collective import reference as ref
from tests.collective.sum_dtype_cases import CASES, FLOAT32, factors, scattered, too_large
from tests.collective.test_fused import fused
from tests.collective.test_values import PATHS, on_path
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import choices

ops = torch.ops.symm_overlap


def on_one_path(me: Rank, case: Callable[..., None], path: Any, dtype: torch.dtype) -> None:
    with on_path(path):
        case(me, dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_exact_values_on_every_path(ranks: Pool, path: Any, case: Callable[..., None]) -> None:
    for world in (1, 3) if path is None else (2 + PATHS.index(path) % 2,):
        ranks.run(world, on_one_path, case, path, torch.bfloat16)


@pytest.mark.parametrize("case", one_in(2, CASES))
def test_exact_values_in_float16(ranks: Pool, case: Callable[..., None]) -> None:
    for path in (PATHS[1], PATHS[4]):
        ranks.run(2, on_one_path, case, path, torch.float16)


def in_the_kernel(me: Rank) -> None:
    """One product is sent in half precision, so the kernel computes it as any other."""
    shape, name = (4 * me.world, 3), me.group_name
    A, B = ref.binary(shape, torch.bfloat16, seed=me.rank) * 15, ref.binary((3, 5), torch.bfloat16, seed=9) * 15
    expected = scattered((A @ B).float(), "sum", 0, me)
    with fused(), choices() as made:
        ref.same(symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group, out_dtype=FLOAT32), expected)
        summed = [A], [B], None, "sum", 0, name
        ref.same(ops.fused_matmuls_reduce_scatter(*summed, sum_dtype=FLOAT32), expected)
    assert [choice.path for _, choice in made] == ["fused"] * 2
    assert too_large(expected, torch.bfloat16)


def test_exact_values_of_the_fused_path(ranks: Pool) -> None:
    ranks.run(2, in_the_kernel, timeout=120)


def alone(me: Rank) -> None:
    """Products, or their sum, are rounded, although sums over ranks are not."""
    A, B = ref.normal((4, 33), torch.bfloat16, seed=1), ref.normal((33, 5), torch.bfloat16, seed=2)
    ref.same(symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group, out_dtype=FLOAT32), (A @ B).float())
    summed = [A, A + 1], [B, B], None, "sum", 0, me.group_name
    assert not too_large(ops.fused_matmuls_reduce_scatter(*summed, out_dtype=FLOAT32), torch.bfloat16)
    assert too_large(ops.fused_matmuls_reduce_scatter(*summed, sum_dtype=FLOAT32), torch.bfloat16)


def test_products_are_rounded_to_their_dtype(ranks: Pool) -> None:
    ranks.run(1, alone)


def in_any_order(me: Rank) -> None:
    (A,), (B,) = factors(me, torch.bfloat16, 0, 1)
    with symm_overlap.force_path("c10d"), symm_overlap.sum_order("any"):
        found = symm_overlap.matmul_reduce_scatter(A, B, "avg", 0, me.group, out_dtype=FLOAT32)
    ref.same(found, scattered((A @ B).float(), "avg", 0, me))


def test_the_librarys_own_sum_has_the_dtype_too(ranks: Pool) -> None:
    ranks.run(2, in_any_order)


def plain(terms: list[Tensor], dtypes: dict[str, Any]) -> Tensor:
    """Return the sum of one rank's terms, As, Bs and maybe an addend, as plain PyTorch computes it."""
    number = len(terms) // 2
    products = [A @ B for A, B in zip(terms[:number], terms[number : 2 * number], strict=True)]
    if "sum_dtype" in dtypes:
        products = [each.to(dtypes["sum_dtype"]) for each in products]
    return sum([*products[1:], *terms[2 * number :]], products[0]).float()


def terms_of(rank: int, shape: list[int], columns: int, number: int, extra: bool) -> list[Tensor]:
    """Return As, Bs and maybe an addend of a rank."""
    As = [ref.binary(shape, torch.bfloat16, seed=10 * rank + each) for each in range(number)]
    Bs = [ref.binary((4, columns), torch.bfloat16, seed=50 + each) for each in range(number)]
    more = [ref.binary([*shape[:2], columns], FLOAT32, seed=rank)] if extra else []
    return [each.requires_grad_() for each in (*As, *Bs, *more)]


def gradients(me: Rank) -> None:
    """Gradients are those of the same program in plain PyTorch, whose reduce-scatter sends float32."""
    for dim, reduce_op, number, extra in itertools.product(range(3), ("sum", "avg"), (1, 2), (False, True)):
        shape, columns = [5, 3, 4], 6 * (me.world if dim == 2 else 1)
        if dim < 2:
            shape[dim] *= me.world
        dtypes = {"sum_dtype": FLOAT32} if extra or number > 1 else {"out_dtype": FLOAT32}
        everyone = [terms_of(rank, shape, columns, number, extra) for rank in range(me.world)]
        totals = [plain(each, dtypes) for each in everyone]
        total = sum(totals[1:], totals[0]) / (me.world if reduce_op == "avg" else 1)
        weight, mine = ref.binary(total.shape, FLOAT32, seed=70) * 257, everyone[me.rank]  # 257: not in bfloat16
        expected = torch.autograd.grad((total * weight).sum(), mine)
        summed = mine[:number], mine[number : 2 * number], mine[-1] if extra else None, reduce_op, dim, me.group_name
        found = ops.fused_matmuls_reduce_scatter(*summed, **dtypes)
        assert found.dtype == FLOAT32
        loss = (found * weight.chunk(me.world, dim)[me.rank]).sum()
        for one, other in zip(torch.autograd.grad(loss, mine), expected, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        X = mine[0].detach().requires_grad_()
        if dim < 2:
            symm_overlap.reduce_scatter(X, reduce_op, dim, me.group, out_dtype=FLOAT32).sum().backward()
            assert X.grad.dtype == torch.bfloat16
            assert X.grad.eq(1 / (me.world if reduce_op == "avg" else 1)).all()


def test_gradients_are_those_of_plain_pytorch(ranks: Pool) -> None:
    ranks.run(2, gradients)


def under_autocast(me: Rank) -> None:
    """Autocast multiplies in half precision, and the result is float32 if that is asked for."""
    A, B = ref.binary((4 * me.world, 760), FLOAT32, seed=me.rank), ref.binary((760, 5), FLOAT32, seed=9)
    with torch.autocast("cpu", torch.bfloat16):
        found = symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group, out_dtype=FLOAT32)
    product = (A.bfloat16() @ B.bfloat16()).float()
    ref.same(found, scattered(product, "sum", 0, me))
    addend = ref.binary(product.shape, FLOAT32, seed=me.rank)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.fused_matmuls_reduce_scatter([A], [B], addend, "sum", 0, me.group_name, sum_dtype=FLOAT32)
    ref.same(found, scattered(product + addend, "sum", 0, me))


def test_autocast_casts_the_factors(ranks: Pool) -> None:
    ranks.run(2, under_autocast)


def test_what_can_be_in_half_precision_is_sent_in_it() -> None:
    half, addend = torch.bfloat16, torch.zeros(1)
    assert sum_dtypes(half, 1, None, FLOAT32) == (half, half, FLOAT32)
    assert sum_dtypes(half, 1, None, None, FLOAT32) == (half, half, FLOAT32)
    assert sum_dtypes(half, 2, None, None, FLOAT32) == (half, half, FLOAT32)
    assert sum_dtypes(half, 2, None, FLOAT32) == (half, FLOAT32, FLOAT32)
    assert sum_dtypes(half, 1, addend, FLOAT32) == (half, FLOAT32, FLOAT32)
    assert sum_dtypes(half, 0, addend.to(half), FLOAT32) == (half, half, FLOAT32)
    assert sum_dtypes(half, 1) == (half, half, half)
    assert [sent_in(half, each) for each in (half, FLOAT32, torch.float64)] == [half, half, torch.float64]
    assert sent_in(FLOAT32, torch.float64) == torch.float64


def test_the_problem_says_what_is_multiplied_and_what_is_sent() -> None:
    """A path is chosen by both: by the time of the matmul, and by the bytes that are sent."""
    A, B = torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(3, 5, dtype=torch.bfloat16)
    one, two = (_described([A] * n, [B] * n, None, "sum", 0, None, 2, FLOAT32, None).problem for n in (1, 2))
    assert (one.factors, one.dtype, one.nbytes) == (torch.bfloat16, torch.bfloat16, 2 * 5 * 2)
    assert (two.factors, two.dtype, two.nbytes) == (torch.bfloat16, FLOAT32, 2 * 5 * 4)
    assert "out_dtype=torch.float32" in one.common
    assert "factors=torch.bfloat16" in two.common
