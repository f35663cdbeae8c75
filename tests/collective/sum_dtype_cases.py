"""Sums over ranks whose result has another dtype than the products, or whose products are added in another one; and
what is rounded how often.

All products are whole numbers that half precision holds, and most of their sums are whole numbers that it does not
hold. The functions here use the path that the caller has chosen.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor

import symm_overlap
from tests.collective import reference as ref
from tests.ranks import Rank

ops = torch.ops.symm_overlap
FLOAT32 = torch.float32
K = {torch.bfloat16: 760, torch.float16: 7000}  # products are below 256 and 2048, most sums are above


def factors(me: Rank, dtype: torch.dtype, dim: int, products: int) -> tuple[list[Tensor], list[Tensor]]:
    shape, columns = [5, 3, K[dtype]], 6 * (me.world if dim == 2 else 1)
    if dim < 2:
        shape[dim] *= me.world
    As = [ref.binary(shape, dtype, seed=10 * me.rank + number).to(me.device) for number in range(products)]
    return As, [ref.binary((shape[-1], columns), dtype, seed=90 + number).to(me.device) for number in range(products)]


def scattered(total: Tensor, reduce_op: str, dim: int, me: Rank) -> Tensor:
    """Return this rank's part of the sum of float32 tensors, added up in rank order."""
    mine = total.cpu().contiguous()
    totals = [torch.empty_like(mine) for _ in range(me.world)]
    dist.all_gather(totals, mine, me.group)
    result = sum(totals[1:], totals[0]) / (me.world if reduce_op == "avg" else 1)
    return result.chunk(me.world, dim)[me.rank].contiguous().to(total.device)


def too_large(result: Tensor, dtype: torch.dtype) -> bool:
    """True if a dtype does not hold the result."""
    return not torch.equal(result.to(dtype).float(), result)


def results_in_float32(me: Rank, dtype: torch.dtype) -> None:
    rounded = False
    for dim, reduce_op in itertools.product(range(3), ("sum", "avg")):
        (A,), (B,) = factors(me, dtype, dim, 1)
        product = A @ B
        expected = scattered(product.float(), reduce_op, dim, me)
        rounded = rounded or too_large(expected, dtype)
        reduced = reduce_op, dim, me.group
        for _ in range(2):
            ref.same(symm_overlap.matmul_reduce_scatter(A, B, *reduced, out_dtype=FLOAT32), expected)
            ref.same(symm_overlap.reduce_scatter(product, *reduced, out_dtype=FLOAT32), expected)
        summed = [A], [B], None, reduce_op, dim, me.group_name
        ref.same(ops.fused_matmuls_reduce_scatter(*summed, sum_dtype=FLOAT32), expected)
        summed = [], [], product, reduce_op, dim, me.group_name
        ref.same(ops.fused_matmuls_reduce_scatter(*summed, sum_dtype=FLOAT32), expected)
        ref.same(symm_overlap.matmul_reduce_scatter(A, B, *reduced, out_dtype=dtype), expected.to(dtype))
    assert rounded or me.world == 1


def sums_in_float32(me: Rank, dtype: torch.dtype) -> None:
    rounded = False
    for dim, reduce_op in itertools.product(range(3), ("sum", "avg")):
        As, Bs = factors(me, dtype, dim, 3)
        products = [(A @ B).float() for A, B in zip(As, Bs, strict=True)]
        total = products[0] + products[1] + products[2]
        rounded = rounded or too_large(total, dtype)
        addend = ref.binary(total.shape, FLOAT32, seed=me.rank).to(me.device)
        for extra in (None, addend, addend.to(dtype)):
            expected = scattered(total if extra is None else total + extra, reduce_op, dim, me)
            summed = As, Bs, extra, reduce_op, dim, me.group_name
            for _ in range(2):
                ref.same(ops.fused_matmuls_reduce_scatter(*summed, sum_dtype=FLOAT32), expected)
    assert rounded


def a_bias_is_rounded_with_its_product(me: Rank, dtype: torch.dtype) -> None:
    """In bfloat16, 257 is rounded to 256. So 257 + 1 is 258 if only the sum is rounded, and 256 otherwise."""
    most, group, name = {torch.bfloat16: 256, torch.float16: 2048}[dtype], me.group, me.group_name
    A = torch.tensor([[most, 1]], dtype=dtype, device=me.device).expand(6 * me.world, 2)
    B, bias = torch.ones(2, 3 * me.world, dtype=dtype, device=me.device), torch.arange(3, dtype=dtype).to(me.device)
    bias = bias.repeat(me.world) + 1
    row = torch.tensor([most + 2, most + 4, most + 4], dtype=dtype, device=me.device)
    product, plain = row.repeat(6 * me.world, me.world), torch.full((6 * me.world, 3 * me.world), most).to(A)
    for _ in range(2):
        ref.same(symm_overlap.matmul_all_reduce(A, B, "avg", group, bias), product)
        _, products = symm_overlap.all_gather_matmul(A[:6], [B, B, B], 0, group, biases=[bias, None, bias])
        for found, expected in zip(products, (product, plain, product), strict=True):
            ref.same(found, expected)
        for dim in range(2):
            part = product.chunk(me.world, dim)[me.rank].contiguous()
            ref.same(symm_overlap.matmul_reduce_scatter(A, B, "avg", dim, group, bias), part)
            in_float32 = symm_overlap.matmul_reduce_scatter(A, B, "avg", dim, group, bias, out_dtype=FLOAT32)
            ref.same(in_float32, part.float())
            twice = [A, A], [B, B], None, "avg", dim, name, [bias, bias]
            ref.same(ops.fused_matmuls_reduce_scatter(*twice), part * 2)
            ref.same(ops.fused_matmuls_reduce_scatter(*twice, sum_dtype=FLOAT32), part.float() * 2)
            found, (kept,), total = ops.fused_matmuls_reduce_scatter_keep(*twice, keep=[1], keep_sum=True)
            for one, other in ((found, part * 2), (kept, product), (total, product * 2)):
                ref.same(one, other)


CASES = [results_in_float32, sums_in_float32, a_bias_is_rounded_with_its_product]
