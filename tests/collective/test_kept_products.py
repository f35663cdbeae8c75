"""A reduce-scatter that also returns what this rank computed: products, and their sum, whole, on every path."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import symm_overlap
from symm_overlap.collective.kept_products import _blocks
from tests.collective import reference as ref
from tests.ranks import Pool, Rank
from tests.transforms import in_place

ops = torch.ops.symm_overlap
WAYS: list[tuple[str | None, int | None, int | None]] = [
    (None, None, None),
    ("sequential", None, None),
    *(("pipelined", chunks, streams) for chunks in (1, 2, 3) for streams in (1, 2)),
    ("c10d", None, None),
    ("c10d", 2, None),
]
BATCH, ROWS, K, N = 3, 5, 7, 2  # rows are what no chunk count divides
Wanted = tuple[list[int], bool]
# Of two products: which are kept, in which order, and whether the sum is.
WANTED: list[Wanted] = [([0], False), ([1], False), ([], True), ([1, 0], False), ([0], True), ([1, 0], True)]


def scattered(
    me: Rank, inputs: Sequence[tuple[list[Tensor], list[Tensor], Tensor | None]], reduce_op: str, dim: int
) -> Tensor:
    """This rank's part of the sum over ranks, from the inputs of all ranks."""
    total = sum(local_sum(*each) for each in inputs)
    assert isinstance(total, Tensor)
    if reduce_op == "avg":
        total = total / me.world
    return total.chunk(me.world, dim)[me.rank].contiguous()


def local_sum(As: list[Tensor], Bs: list[Tensor], addend: Tensor | None) -> Tensor:
    total = sum(A @ B for A, B in zip(As, Bs, strict=True))
    assert isinstance(total, Tensor)
    return total if addend is None else total + addend


def inputs_of(rank: int, world: int, dim: int, products: int, addend: bool, dtype: torch.dtype) -> Any:
    shape, columns = [BATCH, ROWS], N
    if dim < 2:
        shape[dim] *= world
    else:
        columns *= world
    seeds = itertools.count(100 * rank)
    As = [ref.binary([*shape, K], dtype, next(seeds)) for _ in range(products)]
    Bs = [ref.binary([K, columns], dtype, next(seeds)) for _ in range(products)]
    return As, Bs, ref.binary([*shape, columns], dtype, next(seeds)) if addend else None


def exact(me: Rank, dtype: torch.dtype, dim: int) -> None:
    cases = [(1, False, ([0], False)), (1, False, ([], True)), (1, True, ([], True)), (1, True, ([0], True))]
    cases += [(2, addend, wanted) for addend in (False, True) for wanted in WANTED]
    for number, (products, addend, (keep, keep_sum)) in enumerate(cases):
        reduce_op = ("sum", "avg")[number % 2] if me.world in (1, 2, 4) else "sum"
        everyone = [inputs_of(rank, me.world, dim, products, addend, dtype) for rank in range(me.world)]
        mine = everyone[me.rank]
        output, kept, total = ops.fused_matmuls_reduce_scatter_keep(
            *mine, reduce_op, dim, me.group_name, keep=keep, keep_sum=keep_sum
        )
        ref.same(output, scattered(me, everyone, reduce_op, dim))
        assert len(kept) == len(keep)
        for index, product in zip(keep, kept, strict=True):
            ref.same(product, mine[0][index] @ mine[1][index])
        assert (total is not None) == keep_sum
        if total is not None:
            ref.same(total, local_sum(*mine))


def exact_on_every_way(me: Rank, dtype: torch.dtype, here: bool) -> None:
    with in_place(here):
        for (path, chunks, streams), dim in itertools.product(WAYS, range(3)):
            with symm_overlap.force_path(path, chunks=chunks, streams=streams):
                exact(me, dtype, dim)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_output_and_products_are_exact_on_every_path(ranks: Pool, world: int) -> None:
    # Every dtype once, and the plans of a GPU, which copy, once.
    dtype = [torch.float32, torch.float64, torch.bfloat16, torch.float16][world - 1]
    ranks.run(world, exact_on_every_way, dtype, world != 3, timeout=240)
