"""A reduce-scatter can also return this rank's whole products and their whole sum. Both are right on every path."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import symm_overlap
from symm_overlap.collective.parts.places import _blocks
from tests.collective import reference as ref
from tests.collective.test_accesses import WAYS as WAYS_OF_PLANS
from tests.collective.test_accesses import recording
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import in_place, poisoned_outputs

ops = torch.ops.symm_overlap
WAYS: list[tuple[str | None, int | None, int | None]] = [
    (None, None, None),
    ("sequential", None, None),
    *(("pipelined", chunks, streams) for chunks in (1, 3) for streams in (1, 2)),
    ("c10d", None, None),
    ("c10d", 2, None),
]
F64 = torch.float64
BATCH, ROWS, K, N = 3, 5, 7, 2  # not every tested number of chunks divides the rows
Wanted = tuple[list[int], bool]
# For two products: which of them are kept, in which order, and whether the sum is kept.
WANTED: list[Wanted] = [([0], False), ([1], False), ([], True), ([1, 0], False), ([0], True), ([1, 0], True)]


def scattered(
    rank: int, inputs: Sequence[tuple[list[Tensor], list[Tensor], Tensor | None]], reduce_op: str, dim: int
) -> Tensor:
    """Return a rank's part of the sum over ranks, computed from the inputs of all ranks."""
    total = sum(local_sum(*each) for each in inputs)
    assert isinstance(total, Tensor)
    if reduce_op == "avg":
        total = total / len(inputs)
    return total.chunk(len(inputs), dim)[rank].contiguous()


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


class Case(NamedTuple):
    """The inputs of this rank, and what it must get. It is the same on every path, so it is computed once."""

    mine: Any
    output: Tensor
    products: list[Tensor]
    total: Tensor


@lru_cache
def case_of(rank: int, world: int, dim: int, products: int, addend: bool, dtype: torch.dtype, reduce_op: str) -> Case:
    everyone = [inputs_of(each, world, dim, products, addend, dtype) for each in range(world)]
    As, Bs, _ = mine = everyone[rank]
    whole = [A @ B for A, B in zip(As, Bs, strict=True)]
    return Case(mine, scattered(rank, everyone, reduce_op, dim), whole, local_sum(*mine))


def exact(me: Rank, dtype: torch.dtype, dim: int) -> None:
    cases = [(1, False, ([0], False)), (1, False, ([], True)), (1, True, ([], True)), (1, True, ([0], True))]
    cases += [(2, addend, wanted) for addend in (False, True) for wanted in WANTED]
    for number, (products, addend, (keep, keep_sum)) in enumerate(cases):
        reduce_op = ("sum", "avg")[number % 2] if me.world in (1, 2, 4) else "sum"
        case = case_of(me.rank, me.world, dim, products, addend, dtype, reduce_op)
        output, kept, total = ops.fused_matmuls_reduce_scatter_keep(
            *case.mine, reduce_op, dim, me.group_name, keep=keep, keep_sum=keep_sum
        )
        ref.same(output, case.output)
        assert len(kept) == len(keep)
        for index, product in zip(keep, kept, strict=True):
            ref.same(product, case.products[index])
        assert (total is not None) == keep_sum
        if total is not None:
            ref.same(total, case.total)


def exact_on_every_way(me: Rank, dtype: torch.dtype, here: bool) -> None:
    with in_place(here):
        for (path, chunks, streams), dim in itertools.product(WAYS, range(3)):
            with symm_overlap.force_path(path, chunks=chunks, streams=streams):
                exact(me, dtype, dim)


@pytest.mark.parametrize("world", one_in(4, [1, 2, 3, 4], first=2))
def test_output_and_products_are_exact_on_every_path(ranks: Pool, world: int) -> None:
    # Each dtype is tested once. The plans of a GPU, which copy peers' data, are tested once too.
    dtype = [torch.float32, torch.float64, torch.bfloat16, torch.float16][world - 1]
    ranks.run(world, exact_on_every_way, dtype, world != 3, timeout=240)


def poisoned_memory(me: Rank) -> None:
    with poisoned_outputs():
        exact_on_every_way(me, torch.float32, True)


def test_all_of_what_is_kept_is_written(ranks: Pool) -> None:
    ranks.run(2, poisoned_memory, timeout=240)


def strides_of_odd_shapes(me: Rank) -> None:
    w = me.world
    for shape, dim in [((w, 1), 0), ((1, w, 4), 1), ((3, w, 1), 1), ((1, 1, 4), 2), ((2, 1, w, 4), 2), ((w, 0), 0)]:
        columns = 5 * w if dim == len(shape) - 1 else 5
        A = ref.normal((*shape[::-1],), torch.float32, me.rank).permute(*reversed(range(len(shape))))
        B = ref.normal((columns, shape[-1]), torch.float32, 3).t()
        found = call_both(A, B, dim, me)
        with FakeTensorMode() as mode:
            fake = call_both(mode.from_tensor(A), mode.from_tensor(B), dim, me)
        for real, made in zip(found, fake, strict=True):
            assert (real.shape, real.stride()) == (made.shape, made.stride()), (shape, dim)
            assert made.is_contiguous()
        torch.testing.assert_close(found[1], A @ B)
        torch.testing.assert_close(found[2], 2 * (A @ B))


def call_both(A: Tensor, B: Tensor, dim: int, me: Rank) -> list[Tensor]:
    output, (product,), total = ops.fused_matmuls_reduce_scatter_keep(
        [A, A], [B, B], None, "sum", dim, me.group_name, keep=[1], keep_sum=True
    )
    return [output, product, total]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_fake_strides_are_the_real_ones(ranks: Pool, world: int) -> None:
    ranks.run(world, strides_of_odd_shapes)


def undeclared_accesses(me: Rank, dim: int) -> list[str]:
    found = []
    for here, way in WAYS_OF_PLANS:
        with in_place(here), recording(way) as recorder:
            for addend, (keep, keep_sum) in itertools.product((False, True), WANTED):
                inputs = inputs_of(me.rank, me.world, dim, 2, addend, torch.float32)
                ops.fused_matmuls_reduce_scatter_keep(*inputs, "sum", dim, me.group_name, keep=keep, keep_sum=keep_sum)
            assert all("product" in run.plan.buffers for run in recorder.runs)
            found += [f"{way}, in_place={here}: {problem}" for problem in recorder.problems()]
    return found


@pytest.mark.parametrize("dim", range(3))
def test_steps_touch_only_what_their_plan_declares_and_orders(ranks: Pool, dim: int) -> None:
    for found in ranks.run(3, undeclared_accesses, dim, timeout=120):
        assert not found, "\n".join(found)


def one_gradient_of_three(me: Rank, which: int) -> None:
    """The loss uses one output alone. The other outputs then have no gradient, which differs from a zero gradient."""
    inputs = [inputs_of(rank, me.world, 0, 2, False, F64) for rank in range(me.world)]
    everyone = [[tensor.requires_grad_() for tensor in (*As, *Bs)] for As, Bs, _ in inputs]
    mine = everyone[me.rank]
    outputs = call_kept(mine, me)
    expected = [
        torch.stack([A @ C + B @ D for A, B, C, D in everyone]).sum(0).chunk(me.world)[me.rank],
        mine[1] @ mine[3],
        mine[0] @ mine[2] + mine[1] @ mine[3],
    ]
    assert torch.equal(outputs[which], expected[which])
    if which == 0:  # the losses of all ranks' parts add up, as in the backward pass of the op
        expected[0] = torch.stack([A @ C + B @ D for A, B, C, D in everyone]).sum(0)
    found = torch.autograd.grad(outputs[which].square().sum(), mine, allow_unused=True, materialize_grads=True)
    wanted = torch.autograd.grad(expected[which].square().sum(), mine, allow_unused=True, materialize_grads=True)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def call_kept(mine: list[Tensor], me: Rank) -> list[Tensor]:
    output, (product,), total = ops.fused_matmuls_reduce_scatter_keep(
        mine[:2], mine[2:], None, "sum", 0, me.group_name, keep=[1], keep_sum=True
    )
    return [output, product, total]


@pytest.mark.parametrize("which", range(3), ids=["output", "product", "sum"])
def test_the_gradient_of_one_output_alone(ranks: Pool, which: int) -> None:
    ranks.run(2, one_gradient_of_three, which)


@pytest.mark.parametrize(("before", "rows"), [(1, 7), (4, 1), (3, 5), (2, 0)])
def test_blocks_are_every_row_once_in_order(before: int, rows: int) -> None:
    places = torch.arange(before * rows).view(before, rows)
    for start, stop in itertools.combinations_with_replacement(range(before * rows + 1), 2):
        blocks = list(_blocks(start, stop, rows))
        assert len(blocks) <= 3
        found = [places[block].flatten() for block in blocks]
        assert torch.equal(torch.cat([*found, places.new_empty(0)]), torch.arange(start, stop))
