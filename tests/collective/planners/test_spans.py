"""Plans whose matmuls span the parts of several peers: the order of work, values, and the proofs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_all_reduce, produce_reduce_scatter
from symm_overlap.collective.planners.builder import span_sizes
from symm_overlap.plan import Plan, draw, plan_calls, verify
from symm_overlap.plan.testing import redundant
from symm_overlap.plan.testing.redundant import Synchronisation
from tests.quick import one_in

from .cases import OVERLAPPED, REDUCERS, STREAMS, TWO, case_id, contracts_of, delays_copy, in_graphs
from .test_values import check_values

Planner = Callable[..., Plan]
OPTIONS: list[tuple[Planner, dict[str, Any]]] = [
    *((planner, streams) for planner in OVERLAPPED for streams in STREAMS),
    *(
        (all_gather_consume, {"compute": TWO, **options})
        for options in (
            {"keep": True},
            {"symmetric": True},
            {"symmetric": True, "keep": True, "in_place": True},
            {"outbound": "compute0"},
            {"outbound": "compute0", "symmetric": True, "announce_offset": False},
            {"outbound": "compute0", "keep": True, "copies": 2},
        )
    ),
]


def test_there_are_as_few_spans_as_possible_and_the_small_ones_come_first() -> None:
    for count, most in itertools.product(range(20), range(1, 22)):
        sizes = span_sizes(count, most)
        assert (sum(sizes), len(sizes)) == (count, -(-count // most))
        assert sizes == sorted(sizes)
        assert not sizes or sizes[0] >= sizes[-1] - 1
        assert max(sizes, default=1) <= most


def matmuls(plan: Plan) -> list[list[int]]:
    """Return the ranks whose parts each matmul covers."""
    steps = [step for step in plan.steps if step.kind in ("consume", "produce")]
    return [list(range(step.writes[0].start, step.writes[0].stop)) for step in steps]


def test_a_gather_has_short_spans_first_and_a_sum_has_them_last() -> None:
    for rank in range(8):
        order = [(rank + step) % 8 for step in range(1, 8)]
        for planner, own_first in ((all_gather_consume, True), (produce_reduce_scatter, False)):
            found = matmuls(planner(rank, 8, span=4, compute=TWO))
            ranks = [each for matmul in found for each in matmul]
            assert ranks == ([rank, *order] if own_first else [*order, rank])
            sizes = [1, 3, 4] if own_first else [4, 3, 1]
            ends = {*itertools.accumulate(sizes), ranks.index(0)} - {0}  # no matmul covers ranks 7 and 0
            assert {*itertools.accumulate(map(len, found))} == ends


def test_streams_take_turns_with_the_matmuls_of_each_rank() -> None:
    for rank, planner in itertools.product(range(8), OVERLAPPED):
        steps = [step for step in planner(rank, 8, span=3, compute=TWO).steps if step.kind in ("consume", "produce")]
        first = 0 if planner is all_gather_consume else 1
        assert [step.stream for step in steps] == [TWO[(first + number) % 2] for number in range(len(steps))]


def test_each_matmul_of_a_gather_waits_only_for_its_own_parts() -> None:
    plan = all_gather_consume(0, 8, span=4, compute=TWO, outbound="compute0")
    order = [
        (step.kind, step.chunk[0] if step.chunk else None) for step in plan.steps if step.kind in ("pull", "consume")
    ]
    pulls = [("pull", owner) for owner in range(1, 8)]
    # The copies are one part ahead.
    assert order == [("consume", 0), *pulls[:4], ("consume", 1), *pulls[4:], ("consume", 4)]


@pytest.mark.parametrize("planner", REDUCERS)
def test_owners_are_signalled_together_as_soon_as_their_parts_are_computed(planner: Planner) -> None:
    plan = planner(0, 8, span=4, compute=TWO)
    order = [(step.kind, step.peers) for step in plan.steps if step.label == "[partial]" or step.kind == "produce"]
    order = [each for each in order if each[0] != "wait"]
    assert order == [
        ("produce", ()),
        ("signal", (1, 2, 3, 4)),
        ("produce", ()),
        ("signal", (5, 6, 7)),
        ("produce", ()),
    ]


@pytest.mark.parametrize(("planner", "options"), OPTIONS, ids=case_id)
def test_values_are_right_in_three_calls(planner: Planner, options: dict[str, Any]) -> None:
    for world, span in ((3, 2), (5, 2), (5, 9)):
        check_values(planner, world, 1, threads=True, seed=span, span=span, **options)


@pytest.mark.parametrize(("planner", "options"), one_in(2, OPTIONS), ids=case_id)
def test_plans_hold_and_nothing_in_them_is_idle(planner: Planner, options: dict[str, Any]) -> None:
    """No race and no deadlock, also in CUDA graphs, and every synchronisation is needed."""
    for world, span in [*itertools.product(range(1, 7), (2, 3)), (5, 5), (8, 2), (8, 3), (8, 4), (12, 5)]:
        calls = plan_calls(planner, world, span=span, **options)
        found = verify(calls, graphs=in_graphs(calls), contracts=contracts_of(calls))
        assert found.ok, f"world {world}, span {span}: {found}"
    for world, span in ((4, 2), (5, 3)):
        idle = redundant(plan_calls(planner, world, span=span, **options), [0, world // 2])
        assert [taken for taken in idle if not delays_copy(taken) and not _only_for_graphs(taken)] == [], (world, span)


def _only_for_graphs(taken: Synchronisation) -> bool:
    """True if a wait comes after a signal, which matters only where a CUDA graph could choose another order.

    `redundant` cannot look at CUDA graphs here, because the plans of the ranks are not equal.
    """
    return taken.kind == "dependency" and [at.step.kind for at in taken.at] == ["wait", "signal"]


@pytest.mark.parametrize("planner", OVERLAPPED)
def test_ranks_may_have_different_numbers_of_copy_streams(planner: Planner) -> None:
    for copies in itertools.product((1, 2), repeat=4):
        plans = [planner(rank, 4, span=2, compute=TWO, copies=copies[rank]) for rank in range(4)]
        assert verify([plans] * 3, graphs=True, contracts=contracts_of([plans] * 3)).ok, copies


def test_ranks_that_gather_need_not_have_the_same_spans() -> None:
    for spans in itertools.product((1, 2, 3), repeat=4):
        plans = [all_gather_consume(rank, 4, compute=TWO, span=spans[rank]) for rank in range(4)]
        assert verify([plans] * 3, graphs=True, contracts=contracts_of([plans] * 3)).ok, spans


@pytest.mark.parametrize("planner", OVERLAPPED)
@pytest.mark.parametrize("arguments", [{"span": 0}, {"span": -1}, {"span": 2, "chunks": 2}], ids=str)
def test_arguments_out_of_range_are_named(planner: Planner, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"span is {arguments['span']}")):
        planner(0, 4, **arguments)


def test_products_that_are_kept_have_no_spans() -> None:
    with pytest.raises(ValueError, match="span is 2: with keep"):
        produce_reduce_scatter(0, 4, span=2, keep=True)


@pytest.mark.parametrize("arguments", [{"accumulate": True}, {"ring": 2}], ids=str)
def test_parts_that_are_added_up_or_overwritten_have_no_spans(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="span is 2: with accumulate or ring"):
        all_gather_consume(0, 4, span=2, **arguments)


def test_a_picture_names_all_parts_of_a_matmul() -> None:
    calls = plan_calls(produce_all_reduce, 4, 1, span=2, compute=TWO)
    rows = draw.text(calls, [0]).splitlines()
    assert "produce 1-2 !1,2" in rows[1]
    assert "produce 3 !3" in rows[0]
    assert "consume 1-3" in draw.text(plan_calls(all_gather_consume, 4, 1, span=3))
