"""A whole all-reduce gives the same bits in one shot and in shares, and its steps touch only what they declare."""

from __future__ import annotations

import pytest
import torch

import symm_overlap
from symm_overlap import explain
from tests.collective import reference as ref
from tests.collective.test_accesses import CASES, recording
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import comparing, in_place, one_shot, recorded

SHAPES = [(), (1,), (7,), (2, 3), (1, 129), (5, 1), (0, 4), (33, 70)]


def both_ways(me: Rank, here: bool, dtype: torch.dtype, op: str) -> None:
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(me.rank)
        X = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        B = ref.binary((shape[-1] if shape else 1, 3), dtype, seed=5)
        found = []
        for yes in (True, False):
            with one_shot(yes), in_place(here), symm_overlap.force_path("sequential"), recorded() as kinds:
                found.append(symm_overlap.all_reduce(X, op, me.group))
                assert kinds.count("signal") == (me.world > 1) * (1 if yes else 2)
                if len(shape) == 2:
                    found.append(symm_overlap.matmul_all_reduce(X, B, op, me.group))
        once, shared = found[: len(found) // 2], found[len(found) // 2 :]
        for one, other in zip(once, shared, strict=True):
            assert one.dtype == dtype
            ref.same(one, other)
        # Inputs whose sums are exact, so that the order of summation does not matter.
        Y = ref.binary(shape or (1,), dtype, seed=me.rank).reshape(shape)
        total = sum(ref.binary(shape or (1,), torch.float64, seed=rank).reshape(shape) for rank in range(me.world))
        for yes in (True, False):
            with one_shot(yes), in_place(here), symm_overlap.force_path("sequential"):
                ref.same(symm_overlap.all_reduce(Y, "sum", me.group), total.to(dtype))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("here", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("world", one_in(3, [2, 3, 5], first=1))
def test_one_shot_and_shared_out_give_the_same_bits(
    ranks: Pool, world: int, here: bool, dtype: torch.dtype, op: str
) -> None:
    ranks.run(world, both_ways, here, dtype, op)


def problems(me: Rank, case: str, yes: bool, here: bool) -> list[str]:
    with one_shot(yes), in_place(here), comparing(False), recording(("sequential", 1, 1)) as recorder:
        CASES[case](me)
        assert recorder.runs, "no plan has run"
        return recorder.problems()


@pytest.mark.parametrize("here", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("yes", [True, False], ids=["one shot", "shared out"])
@pytest.mark.parametrize("case", ["matmul_all_reduce of 1 rows", "matmul_all_reduce of 7 rows"])
def test_steps_touch_only_what_their_plan_declares_and_orders(ranks: Pool, case: str, yes: bool, here: bool) -> None:
    for found in ranks.run(3, problems, case, yes, here):
        assert not found, "\n".join(found)


@pytest.mark.parametrize("yes", [True, False])
def test_the_helper_of_these_tests_decides(yes: bool) -> None:
    with one_shot(yes), symm_overlap.force_path("sequential"):
        assert explain("all_reduce", m=1 << 20, n=4, world=2, device="cpu").one_shot == yes
