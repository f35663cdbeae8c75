"""Sums over ranks whose result has another dtype than the products, or whose products are added in another one.

All products are whole numbers that half precision holds, and their sums are whole numbers that it does not hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import symm_overlap
from tests.collective import reference as ref
from tests.collective.test_fused import fused
from tests.collective.test_values import PATHS, on_path
from tests.ranks import Pool, Rank
from tests.transforms import choices

ops = torch.ops.symm_overlap
FLOAT32, HALVES = torch.float32, (torch.bfloat16, torch.float16)
K = {torch.bfloat16: 760, torch.float16: 7000}  # products are below 256 and 2048, most sums are above


def factors(me: Rank, dtype: torch.dtype, dim: int, products: int) -> tuple[list[Tensor], list[Tensor]]:
    shape, columns = [5, 3, K[dtype]], 6 * (me.world if dim == 2 else 1)
    if dim < 2:
        shape[dim] *= me.world
    As = [ref.binary(shape, dtype, seed=10 * me.rank + number) for number in range(products)]
    return As, [ref.binary((shape[-1], columns), dtype, seed=90 + number) for number in range(products)]


def scattered(total: Tensor, reduce_op: str, dim: int, me: Rank) -> Tensor:
    """Return this rank's part of the sum of float32 tensors, added up in rank order."""
    totals = [torch.empty_like(total) for _ in range(me.world)]
    dist.all_gather(totals, total.contiguous(), me.group)
    result = sum(totals[1:], totals[0]) / (me.world if reduce_op == "avg" else 1)
    return result.chunk(me.world, dim)[me.rank].contiguous()


def too_large(result: Tensor, dtype: torch.dtype) -> bool:
    return not torch.equal(result.to(dtype).float(), result)


def results_in_float32(me: Rank, path: Any, dtype: torch.dtype) -> None:
    name, rounded = me.group.group_name, False
    for dim, reduce_op in itertools.product(range(3), ("sum", "avg")):
        (A,), (B,) = factors(me, dtype, dim, 1)
        product = A @ B
        expected = scattered(product.float(), reduce_op, dim, me)
        rounded = rounded or too_large(expected, dtype)
        with on_path(path):
            for _ in range(2):
                ref.same(
                    symm_overlap.matmul_reduce_scatter(A, B, reduce_op, dim, me.group, out_dtype=FLOAT32), expected
                )
                ref.same(symm_overlap.reduce_scatter(product, reduce_op, dim, me.group, out_dtype=FLOAT32), expected)
            summed = [A], [B], None, reduce_op, dim, name
            ref.same(ops.fused_matmuls_reduce_scatter(*summed, sum_dtype=FLOAT32), expected)
            narrow = symm_overlap.matmul_reduce_scatter(A, B, reduce_op, dim, me.group, out_dtype=dtype)
            ref.same(narrow, expected.to(dtype))
    assert rounded or me.world == 1


def sums_in_float32(me: Rank, path: Any, dtype: torch.dtype) -> None:
    name, rounded = me.group.group_name, False
    for dim, reduce_op in itertools.product(range(3), ("sum", "avg")):
        As, Bs = factors(me, dtype, dim, 3)
        products = [(A @ B).float() for A, B in zip(As, Bs, strict=True)]
        total = products[0] + products[1] + products[2]
        rounded = rounded or too_large(total, dtype)
        addend = ref.binary(total.shape, FLOAT32, seed=me.rank)
        with on_path(path):
            for extra in (None, addend):
                expected = scattered(total if extra is None else total + extra, reduce_op, dim, me)
                summed = As, Bs, extra, reduce_op, dim, name
                for _ in range(2):
                    ref.same(ops.fused_matmuls_reduce_scatter(*summed, sum_dtype=FLOAT32), expected)
    assert rounded


CASES = [results_in_float32, sums_in_float32]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_exact_values_on_every_path(ranks: Pool, path: Any, case: Callable[..., None]) -> None:
    for world in (1, 2, 3):
        ranks.run(world, case, path, torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_exact_values_in_float16(ranks: Pool, case: Callable[..., None]) -> None:
    for path in (PATHS[1], PATHS[4]):
        ranks.run(2, case, path, torch.float16)


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
        weight, mine = ref.binary(total.shape, FLOAT32, seed=70) * 2, everyone[me.rank]
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
    ref.same(found, scattered((A.bfloat16() @ B.bfloat16()).float(), "sum", 0, me))


def test_autocast_casts_the_factors(ranks: Pool) -> None:
    ranks.run(2, under_autocast)
