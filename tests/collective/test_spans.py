"""Matmuls that span the parts of several peers: values, what is really computed together, and when it is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import symm_overlap
from symm_overlap.collective.choosing import chooser
from symm_overlap.collective.planners.builder import span_sizes
from symm_overlap.plan import Plan, Table
from symm_overlap.plan.testing import delayed
from symm_overlap.settings import transformed
from tests.collective import reference as ref
from tests.collective.accesses import Recorder, watching_extension
from tests.collective.scaled_cases import ONE, float8, powers_of_two, rows_can_be_scaled, weight
from tests.ranks import Pool, Rank
from tests.transforms import comparing, in_place

ROWS, K, N = 16, 128, 128  # every row of 16-bit numbers has 256 bytes, so every part is a multiple of 256 bytes
ops = torch.ops.symm_overlap


@contextmanager
def spanning(me: Rank, span: int, streams: int = 1) -> Iterator[list[int]]:
    """Force spans. Yield a list to which the number of parts of every matmul of this rank is added."""
    sizes: list[int] = []

    def late_and_noted(plan: Plan, table: Table) -> Table:
        table = delayed(table, len(sizes), me.rank, 2e-4)

        def noted(kind: str) -> Any:
            def run(step: Any) -> None:
                sizes.append(max(region.stop - region.start for region in step.writes))
                table[kind](step)

            return run

        return {**table, **{kind: noted(kind) for kind in ("consume", "produce") if kind in table}}

    with symm_overlap.force_path("pipelined", span=span, streams=streams), transformed(late_and_noted):
        yield sizes


def gathers(me: Rank, span: int, streams: int, dtype: torch.dtype) -> list[list[int]]:
    name, found = me.group.group_name, []
    for dim, return_A in ((0, True), (0, False), (1, False)):
        A = ref.binary((ROWS, 2, K), dtype, seed=me.rank)
        Bs = [ref.binary((K, columns), dtype, seed=columns) for columns in (3, N)]
        expected_A, expected = ref.torch_all_gather_matmul(A, Bs, dim, me)
        with spanning(me, span, streams) as sizes:
            found_A, products = ops.fused_all_gather_matmul(A, Bs, dim, name, return_A=return_A)
        found.append(sorted(sizes))
        for y, e in zip(products, expected, strict=True):
            ref.same(y, e)
        if return_A:
            ref.same(found_A, expected_A)
    return found


def scatters(me: Rank, span: int, streams: int, dtype: torch.dtype) -> list[list[int]]:
    name, found = me.group.group_name, []
    for dim in (0, 1):
        shape = [ROWS, 2, K]
        shape[dim] *= me.world
        A, B = ref.binary(shape, dtype, seed=me.rank), ref.binary((K, N), dtype, seed=9)
        expected = ref.torch_matmul_reduce_scatter(A, B, "sum", dim, me)
        with spanning(me, span, streams) as sizes:
            ref.same(ops.fused_matmul_reduce_scatter(A, B, "sum", dim, name), expected)
        found.append(sorted(sizes))
    return found


def reduces(me: Rank, span: int, streams: int, dtype: torch.dtype) -> list[list[int]]:
    """The last ranks' parts are short or empty, unless the rows can be shared out evenly."""
    found = []
    for rows in (ROWS * me.world, ROWS * me.world - 5, ROWS + 1):
        A, B = ref.binary((rows, K), dtype, seed=me.rank), ref.binary((K, N), dtype, seed=9)
        bias = ref.binary((N,), dtype, seed=8)
        with spanning(me, span, streams) as sizes:
            product = symm_overlap.matmul_all_reduce(A, B, "sum", me.group, bias=bias)
        found.append(sorted(sizes))
        ref.same(product, ref.torch_all_reduce(A @ B, "sum", me) + bias * me.world)
    return found


@pytest.mark.parametrize("here", [True, False], ids=["in place", "copies"])
@pytest.mark.parametrize("op", [gathers, scatters, reduces])
@pytest.mark.parametrize(("world", "span", "streams"), [(3, 2, 1), (4, 2, 2), (4, 9, 1)])
def test_values_are_exact_and_parts_are_multiplied_together(
    ranks: Pool, op: Any, world: int, span: int, streams: int, here: bool
) -> None:
    sizes, longest = span_sizes(world - 1, span), 0
    dtype = torch.float32 if here else torch.bfloat16
    for rank, found in enumerate(ranks.run(world, late, op, here, span, streams, dtype)):
        expected = sorted([1, *cut(sizes if op is gathers else sizes[::-1], rank, world)])
        assert found == [expected] * len(found), rank
        longest = max(longest, *found[0])
    assert longest == max(sizes), "a rank makes the longest matmul"


def late(me: Rank, op: Any, here: bool, *arguments: Any) -> list[int]:
    with in_place(here):
        return op(me, *arguments)


def cut(sizes: list[int], rank: int, world: int) -> list[int]:
    """Return the sizes on a rank: a span that contains the last rank and rank 0 is cut between them."""
    order = [(rank + step) % world for step in range(1, world)]
    found: list[int] = []
    for size in sizes:
        span, order = order[:size], order[size:]
        turn = span.index(0) if 0 in span else 0
        found += [each for each in (turn, size - turn) if each]
    return found


def problems(me: Rank, here: bool) -> list[str]:
    """What the steps of forward and backward passes do that their plan does not declare."""
    found = []
    for streams in (1, 2):
        recorder = Recorder()
        with (
            in_place(here),
            comparing(False),
            watching_extension(),
            symm_overlap.force_path("pipelined", span=2, streams=streams),
            transformed(recorder),
        ):
            A, whole, B = (torch.ones(rows, K, requires_grad=True) for rows in (ROWS, ROWS * me.world, N))
            symm_overlap.all_gather_matmul(A, [B.t()], 0, me.group)[1][0].sum().backward()
            symm_overlap.matmul_reduce_scatter(whole, B.t(), "avg", 0, me.group).sum().backward()
            symm_overlap.matmul_all_reduce(whole[:-3], B.t(), "sum", me.group).sum().backward()
        steps = [step for run in recorder.runs for step in run.plan.steps if step.kind in ("consume", "produce")]
        assert any(region.stop - region.start > 1 for step in steps for region in step.writes) or me.rank in (1, 2)
        found += recorder.problems()
    return found


@pytest.mark.parametrize("here", [True, False], ids=["in place", "copies"])
def test_steps_touch_only_what_their_plan_declares(ranks: Pool, here: bool) -> None:
    for found in ranks.run(4, problems, here):
        assert not found, "\n".join(found)


def scaled(me: Rank, rows: bool) -> None:
    """Scaled matmuls have the same bits with spans as on the sequential path."""
    name, B = me.group.group_name, weight(K, N, seed=7)
    for dim, shape in ((0, (ROWS * me.world, 2, K)), (1, (4, ROWS * me.world, K))):
        A = float8(*shape, seed=me.rank)
        scale_A = powers_of_two((*shape[:-1], 1), me.rank) if rows else ONE
        scale_B = powers_of_two((1, N), 3) if rows else ONE
        shard = A.chunk(me.world, dim)[me.rank].contiguous()
        scale = scale_A.chunk(me.world, dim)[me.rank].contiguous() if rows else ONE
        found = []
        for path, span in (("sequential", None), ("pipelined", 3), ("pipelined", 2)):
            with symm_overlap.force_path(path, span=span):
                _, (gathered,) = symm_overlap.all_gather_scaled_matmul(
                    shard, [B], scale, [scale_B], dim, name, return_A=False
                )
                summed = symm_overlap.scaled_matmul_reduce_scatter(
                    A, B, scale_A, scale_B, "sum", dim, name, out_dtype=torch.bfloat16
                )
                found.append((gathered, summed))
        for gathered, summed in found[1:]:
            ref.same(gathered, found[0][0])
            ref.same(summed, found[0][1])


@pytest.mark.parametrize("rows", [False, True] if rows_can_be_scaled() else [False])
def test_scaled_matmuls_span_parts_too(ranks: Pool, rows: bool) -> None:
    ranks.run(4, scaled, rows)


def differs(me: Rank, here: bool) -> list[str]:
    """The chooser of rank 2 chooses another span, as it may if the weights have different numbers of columns."""
    A, B = torch.ones(ROWS * me.world, K), torch.ones(K, N)
    calls = (
        lambda: symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False)[1][0].sum(),
        lambda: symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group).sum(),
    )
    said = []
    with in_place(here), mock.patch.object(chooser, "span_of", return_value=1 + (me.rank == 2)):
        for lane, call in enumerate(calls):
            chooser._choose.cache_clear()
            with symm_overlap.lane(30 + 2 * here + lane), symm_overlap.force_path("pipelined"), comparing(False):
                try:
                    said.append(str(float(call())))
                except RuntimeError as error:
                    said.append(str(error))
    chooser._choose.cache_clear()
    return said


@pytest.mark.parametrize("here", [False, True], ids=["copies", "in place"])
def test_only_ranks_that_gather_by_copies_may_have_different_spans(ranks: Pool, here: bool) -> None:
    """Otherwise the ranks would signal on different channels. They get an error instead of waiting for ever."""
    for gathered, summed in ranks.run(4, differs, here):
        assert gathered == str(4.0 * 4 * ROWS * K * N) if not here else "SYMM_OVERLAP_CHECK" in gathered
        assert "SYMM_OVERLAP_CHECK" in summed
