"""Ranks and streams that run ahead or fall behind at random give the same bits as ranks and streams that do not.

Every call has other inputs than the calls before it, so that a stale chunk of an earlier call is visible.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import symm_overlap
from symm_overlap.plan.testing import delayed
from symm_overlap.settings import transformed, without
from tests.collective import reference as ref
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import comparing

ops = torch.ops.symm_overlap

SEEDS = {2: range(60), 3: range(60, 140), 4: range(140, 200)}
"""The seeds for each world size: 200 per op."""
INPUTS = 5  # used in turn; the number is odd because the workspace has two halves
LONGEST = 3e-4  # the longest pause, in seconds

Op = Callable[[Rank, int], list[Tensor]]


def all_gather_matmul(me: Rank, number: int) -> list[Tensor]:
    dim = number % 2  # along the last dimension, arriving parts are summed in a fixed order
    A = ref.normal((5, 4), torch.float32, seed=100 * number + me.rank)
    Bs = [ref.normal((4 * (me.world if dim else 1), n), torch.float32, seed=number) for n in (3, 6)]
    gathered, products = ops.fused_all_gather_matmul(A, Bs, dim, me.group_name, return_A=number % 3 == 0)
    return products if gathered is None else [gathered, *products]


def matmul_reduce_scatter(me: Rank, number: int) -> list[Tensor]:
    A = ref.normal((5 * me.world, 4), torch.float32, seed=100 * number + me.rank)
    B = ref.normal((4, 3 * me.world), torch.float32, seed=number)
    return [ops.fused_matmul_reduce_scatter(A, B, "sum", number % 2, me.group_name)]


def matmul_all_reduce(me: Rank, number: int) -> list[Tensor]:
    A = ref.normal((7, 4), torch.float32, seed=100 * number + me.rank)
    B = ref.normal((4, 3), torch.float32, seed=number)
    return [ops.fused_matmul_all_reduce(A, B, "avg", me.group_name)]


def all_gather_matmul_at_once(me: Rank, number: int) -> list[Tensor]:
    A = ref.normal((5, 768), torch.float32, seed=100 * number + me.rank)
    B = ref.normal((768, 3), torch.float32, seed=number)
    with symm_overlap.force_path("sequential", streams=2):
        return ops.fused_all_gather_matmul(A, [B], 0, me.group_name, return_A=False)[1]


def matmul_reduce_scatter_at_once(me: Rank, number: int) -> list[Tensor]:
    A = ref.normal((5 * me.world, 4), torch.float32, seed=100 * number + me.rank)
    B = ref.normal((4, 3), torch.float32, seed=number)
    with symm_overlap.force_path("sequential", streams=2):
        return [ops.fused_matmul_reduce_scatter(A, B, "sum", 0, me.group_name)]


def kept_products(me: Rank, number: int) -> list[Tensor]:
    As = [ref.normal((5 * me.world, 4), torch.float32, seed=100 * number + 10 * each + me.rank) for each in range(2)]
    Bs = [ref.normal((4, 3 * me.world), torch.float32, seed=number + each) for each in range(2)]
    path = "sequential" if number % 3 == 0 else None
    with symm_overlap.force_path(path) if path else nullcontext():
        output, products, total = ops.fused_matmuls_reduce_scatter_keep(
            As, Bs, None, "sum", number % 2, me.group_name, keep=[1], keep_sum=True
        )
    assert total is not None
    return [output, *products, total]


def weight_grad(me: Rank, number: int) -> list[Tensor]:
    A = ref.normal((5, 4), torch.float32, seed=100 * number + me.rank)
    grads = [ref.normal((5 * me.world, n), torch.float32, seed=number) for n in (3, 6)]
    return ops.all_gather_weight_grad(A, grads, 0, me.group_name)


def gathered_weight(me: Rank, number: int) -> list[Tensor]:
    """Call both ops, with a different number of rows on each rank."""
    W = ref.normal((5, 4), torch.float32, seed=100 * number + me.rank)
    dim, transpose = number % 2, number % 3 > 0
    contracted = W.shape[1 if transpose else 0] * (me.world if dim == transpose else 1)
    X = ref.normal((2 + me.rank, contracted), torch.float32, seed=number + me.rank)
    product = ops.fused_all_gather_weight_matmul(X, W, dim, transpose, me.group_name)
    G = ref.normal((2 + me.rank, 3 * me.world), torch.float32, seed=number + me.rank)
    return [product, ops.weight_grad_reduce_scatter(X, G, "sum", 1, me.group_name)]


def copies(me: Rank, number: int) -> list[Tensor]:
    """Call the ops without a matmul."""
    X = ref.normal((2 * me.world, 3 * me.world), torch.float32, seed=100 * number + me.rank)
    return [
        ops.all_gather(X, number % 2, me.group_name),
        ops.reduce_scatter(X, "sum", number % 2, me.group_name),
        ops.all_reduce(X, "avg", me.group_name),
    ]


OPS: dict[str, Op] = {
    op.__name__: op
    for op in (
        all_gather_matmul,
        all_gather_matmul_at_once,
        matmul_reduce_scatter,
        matmul_reduce_scatter_at_once,
        matmul_all_reduce,
        kept_products,
        weight_grad,
        gathered_weight,
        copies,
    )
}


def pauses(seed: int) -> AbstractContextManager[None]:
    return transformed(lambda plan, table: delayed(table, seed, plan.rank, LONGEST))


def seeds_with_other_bits(me: Rank, name: str, seeds: range, lane: int, drop_waits: bool) -> list[int]:
    op = OPS[name]
    with comparing(False), symm_overlap.lane(lane), symm_overlap.force_path("pipelined", chunks=2, streams=2):
        expected = [op(me, number) for number in range(INPUTS)]
        # Without waits, a rank runs ahead, and a rank that still waits would think that it makes a different call.
        dist.barrier(me.group)
        differ = []
        with transformed(without("waits")) if drop_waits else nullcontext():
            for seed in seeds:
                with pauses(seed):
                    found = op(me, seed % INPUTS)
                if not all(torch.equal(a, b) for a, b in zip(found, expected[seed % INPUTS], strict=True)):
                    differ.append(seed)
    return differ


@pytest.mark.parametrize("world", one_in(3, SEEDS, first=1))
@pytest.mark.parametrize("op", OPS)
def test_200_interleavings_of_an_op_give_the_same_bits(
    ranks: Pool, fresh_lane: Callable[[], int], op: str, world: int
) -> None:
    assert ranks.run(world, seeds_with_other_bits, op, SEEDS[world], fresh_lane(), False) == [[]] * world


@pytest.mark.parametrize("op", OPS)
def test_interleavings_without_waits_are_found_out(ranks: Pool, fresh_lane: Callable[[], int], op: str) -> None:
    found = ranks.run(3, seeds_with_other_bits, op, range(30), fresh_lane(), True)
    assert all(found), f"some rank never read a chunk too soon: {found}"
