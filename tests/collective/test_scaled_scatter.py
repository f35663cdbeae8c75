"""A scaled matmul of float8 numbers and a reduce-scatter equal ``torch._scaled_mm`` and a sum over ranks, on each path.

This holds whether the caller wants the product too or not. Numbers and scales are chosen so that every product is
exact. So one wrong row, or a scale of a wrong row, is visible.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from symm_overlap.plan import Plan, Table
from symm_overlap.settings import transformed
from tests.collective import reference as ref
from tests.collective.scaled_cases import (
    E4M3,
    E5M2,
    ONE,
    WAYS,
    K,
    float8,
    needs_row_scales,
    powers_of_two,
    scaled_mm,
    scatter,
    way,
    weight,
)
from tests.collective.test_fake_group import fake_group
from tests.ranks import Pool, Rank
from tests.transforms import in_place, poisoned_outputs


def scatters(me: Rank, per_row: bool, ways: list[tuple[Any, ...]]) -> None:
    w, dtypes = me.world, itertools.cycle(itertools.product((E4M3, E5M2), repeat=2))
    outs = itertools.cycle([torch.bfloat16, torch.float32, torch.float16])
    cube, thin, flat = (3 * w, 2 * w, K), (3 * w, w, K), (5 * w, K)
    for shape, dim in [(cube, 0), (cube, 1), (thin, 1), (cube, 2), (flat, 0), (flat, 1)]:
        (A_dtype, B_dtype), out, n = next(dtypes), next(outs), 4 * w
        As = [float8(*shape, seed=rank, dtype=A_dtype) for rank in range(w)]
        B, bias = weight(K, n, seed=3, dtype=B_dtype), torch.arange(float(n))
        A_scales = [powers_of_two((*shape[:-1], 1), seed=rank) if per_row else torch.tensor(1.0) for rank in range(w)]
        B_scale = powers_of_two((1, n), seed=8) if per_row else torch.tensor(0.5)
        partials = [scaled_mm(A, B, scale, B_scale, bias, out) for A, scale in zip(As, A_scales, strict=True)]
        expected = sum(partial.float() for partial in partials).to(out).chunk(w, dim)[me.rank]
        for chosen in ways:
            scale = A_scales[me.rank]
            for A in (
                As[me.rank],
                As[me.rank].flatten(0, -2),
            ):  # torch's compiler passes flattened rows
                rows = scale.view(*A.shape[:-1], 1) if per_row else scale
                dims, rest = (dim, min(dim, A.dim() - 1)), (me.group_name, [*shape[:-1], n], bias)
                for keep in (False, True):
                    with way(*chosen):
                        found, *kept = scatter(keep)(A, B, rows, B_scale, "sum", *dims, *rest, out_dtype=out)
                    ref.same(found, expected.contiguous())
                    assert len(kept) == keep
                    for product in kept:
                        ref.same(product, partials[me.rank])
        assert expected.any()


@pytest.mark.parametrize("per_row", [False, pytest.param(True, marks=needs_row_scales)], ids=["tensor", "rows"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_scatter_equals_the_sum_of_torchs_matmuls(ranks: Pool, world: int, per_row: bool) -> None:
    ranks.run(world, scatters, per_row, WAYS[:1] if world == 1 else WAYS)


def scatters_into_poisoned_memory(me: Rank) -> None:
    with poisoned_outputs(), in_place(False):  # with a GPU's plans, which copy
        scatters(me, False, WAYS)


def test_all_of_the_product_is_written(ranks: Pool) -> None:
    ranks.run(2, scatters_into_poisoned_memory)


def where_own_parts_are_made(me: Rank, dim: int) -> list[set[str]]:
    """Return the buffers to which the rank's own part is written: without and with a product that is kept."""
    A, B, plans = float8(2 * me.world, 1, K), weight(K, 4), []

    def record(plan: Plan, table: Table) -> Table:
        plans.append(plan)
        return table

    for keep in (False, True):
        with transformed(record), way("pipelined", 1, 1):
            scatter(keep)(A, B, ONE, ONE, "sum", dim, dim, me.group_name, None, out_dtype=torch.float32)
    own = [step for plan in plans for step in plan.steps if step.kind == "produce" and step.chunk == (me.rank, 0)]
    return [{region.buffer for region in step.writes} for step in own]


@pytest.mark.parametrize(("dim", "kept"), [(0, {"product"}), (2, {"product", "workspace"})])
def test_the_own_part_is_made_in_the_product_where_its_rows_lie_together(ranks: Pool, dim: int, kept: set[str]) -> None:
    """If its rows are contiguous in the kept product, the own part is computed there without a copy."""
    assert ranks.run(2, where_own_parts_are_made, dim) == [[{"workspace"}, kept]] * 2


def kept_on_a_fake_group(path: str, dim: int) -> None:
    A, B, scales = float8(6, K, seed=1), weight(K, 6, seed=2), (ONE, ONE / 2)
    with fake_group(3, 1) as name, way(path, None, None):
        output, product = scatter(True)(A, B, *scales, "sum", dim, dim, name, None, out_dtype=torch.float32)
    expected = A.float() @ B.float() / 2
    ref.same(product, expected)
    ref.same(output, expected.chunk(3, dim)[1].contiguous())  # the sum of this rank alone


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("path", ["sequential", "pipelined", "c10d"])
def test_what_a_rank_keeps_of_its_own_product_is_real_on_a_fake_group(path: str, dim: int) -> None:
    kept_on_a_fake_group(path, dim)
