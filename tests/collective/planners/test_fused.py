"""Plans with one kernel whose tiles wait for copies, or whose tiles copies wait for, while the kernel runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from symm_overlap.collective.planners import (
    all_gather_consume,
    fused_all_gather_matmul,
    fused_matmul_all_reduce,
    fused_matmul_reduce_scatter,
    one_launch,
    produce_all_reduce,
    produce_reduce_scatter,
)
from symm_overlap.plan import Costs, Plan, layout, plan_calls, simulate, verify
from symm_overlap.plan.testing import redundant

from .cases import contracts_of, delays_copy

PLANNERS: list[tuple[Callable[..., Plan], dict[str, tuple[Any, ...]]]] = [
    (
        fused_all_gather_matmul,
        {"keep": (False, True), "symmetric": (False, True), "announce_offset": (True, False), "copies": (1, 2)},
    ),
    (fused_matmul_reduce_scatter, {"copies": (1, 2)}),
    (fused_matmul_all_reduce, {"copies": (1, 2)}),
]
FLAGS = {("raise", "tiles"), ("tiles", "poll")}
WAYS = [
    (planner, dict(zip(options, values, strict=True)))
    for planner, options in PLANNERS
    for values in itertools.product(*options.values())
]


@pytest.mark.parametrize(("planner", "options"), WAYS)
@pytest.mark.parametrize("apart", [False, True])
def test_no_deadlock_with_tiles_in_order_and_no_race_with_tiles_in_any_order(
    planner: Callable[..., Plan], options: dict[str, Any], apart: bool
) -> None:
    for world, chunks in itertools.product((1, 2, 3, 4), (1, 2)):
        calls = plan_calls(planner, world, chunks=chunks, apart=apart, **options)
        verify(calls, graphs=True, contracts=contracts_of(calls)).raise_for_problems()


@pytest.mark.parametrize(("planner", "options"), WAYS)
def test_no_synchronisation_is_idle(planner: Callable[..., Plan], options: dict[str, Any]) -> None:
    """No synchronisation of a fused plan is redundant."""
    found = redundant(plan_calls(planner, 3, chunks=2, apart=True, **options), [0], graphs=True)
    assert [taken for taken in found if not delays_copy(taken)] == []


@pytest.mark.parametrize(("planner", "options"), WAYS)
def test_a_flag_that_is_not_waited_for_is_a_race(planner: Callable[..., Plan], options: dict[str, Any]) -> None:
    calls = plan_calls(planner, 3, apart=True, **options)
    removed = 0
    for index, step in enumerate(calls[0][0].steps):
        flags = [e for e in step.after if (calls[0][0].steps[e].kind, step.kind) in FLAGS]
        if flags:
            removed += 1
            left = tuple(earlier for earlier in step.after if earlier not in flags) or (0,)
            steps = [*calls[0][0].steps[:index], replace(step, after=left), *calls[0][0].steps[index + 1 :]]
            broken = [[replace(calls[0][0], steps=tuple(steps)), *calls[0][1:]], *calls[1:]]
            assert not verify(broken).ok, str(step)
    assert removed >= 2


@pytest.mark.parametrize(("planner", "options"), WAYS)
def test_the_tiles_are_one_step_and_flags_are_no_events(planner: Callable[..., Plan], options: dict[str, Any]) -> None:
    """All tiles become one step, the kernel. Flags replace the events between tiles and copies."""
    for world, rank in ((1, 0), (2, 1), (4, 2)):
        plan = planner(rank, world, chunks=2, **options)
        launched = one_launch(plan)
        (kernel,) = (step for step in launched.steps if step.kind == "tiles")
        tiles = [step for step in plan.steps if step.kind == "tiles"]
        assert kernel.reads == tuple(region for tile in tiles for region in tile.reads)
        assert kernel.writes == tuple(region for tile in tiles for region in tile.writes)
        kinds = [[launched.steps[earlier].kind for earlier in step.after] for step in launched.steps]
        for step, after in zip(launched.steps, kinds, strict=True):
            assert not (step.kind == "tiles" and "raise" in after)
            assert not (step.kind == "poll" and "tiles" in after)
        # All steps outside the kernel remain, in the same order.
        others = [(step.kind, step.stream, step.chunk) for step in plan.steps if step.kind != "tiles"]
        assert [(s.kind, s.stream, s.chunk) for s in launched.steps if s.kind != "tiles"] == others
        # No stream starts before the call begins, although flags are no longer events.
        first = {step.stream: step for step in reversed(launched.steps)}
        assert all(step.after or step.kind == "fork" for step in first.values())
        # The call ends after its copies. It used to follow them through the tiles, which waited for the copies.
        ends = {step.stream: index for index, step in enumerate(launched.steps[:-1])}
        copies = {end for stream, end in ends.items() if stream != launched.steps[-1].stream}
        assert copies <= set(launched.steps[-1].after)


def test_tiles_are_in_the_order_of_arrival_own_first() -> None:
    """Tiles of the local shard run first, in place, while the next neighbour's shard arrives."""
    for rank in range(4):
        plan = fused_all_gather_matmul(rank, 4, chunks=2)
        arrival = [((rank + step) % 4, piece) for step in range(4) for piece in range(2)]
        assert [step.chunk for step in plan.steps if step.kind == "tiles"] == arrival
        assert [step.chunk for step in plan.steps if step.kind == "raise"] == arrival[2:]
        pulled = [region for step in plan.steps if step.kind == "pull" for region in step.reads]
        assert all(region.rank != rank for region in pulled), "the local shard is read in place"


def test_rows_for_the_next_rank_are_made_and_pushed_first_and_own_ones_last() -> None:
    """Every chunk except the rank's own then travels while tiles are computed."""
    for rank in range(4):
        plan = fused_matmul_reduce_scatter(rank, 4, chunks=2)
        order = [((rank + step) % 4, piece) for step in range(1, 5) for piece in range(2)]
        assert [step.chunk for step in plan.steps if step.kind == "tiles"] == order
        assert [step.chunk for step in plan.steps if step.kind == "push"] == order[:-2]
        reduced = [step for step in plan.steps if step.kind == "reduce"]
        assert [[region.start for region in step.reads] for step in reduced] == [
            [2 * producer + piece if producer != rank else 2 * rank + piece for producer in range(4)]
            for piece in range(2)
        ], "sums are in rank order"


def test_every_chunk_is_summed_by_its_owner_alone_and_then_fetched_in_the_order_of_arrival() -> None:
    """One rank sums each chunk, so all ranks get the same bits."""
    for rank in range(4):
        plan = fused_matmul_all_reduce(rank, 4, chunks=2)
        sums = [step for step in plan.steps if step.kind == "reduce"]
        reduced = {step.chunk: [(each.buffer, each.start) for each in step.writes] for step in sums}
        assert reduced == {
            (rank, piece): [("output", 2 * rank + piece), ("workspace", 2 * rank + piece)] for piece in (0, 1)
        }
        pulled = [step.chunk for step in plan.steps if step.kind == "pull"]
        assert pulled == [((rank + step) % 4, piece) for piece in (0, 1) for step in (1, 2, 3)]


def test_a_half_of_the_workspace_is_no_larger_than_that_of_the_planned_exchange() -> None:
    planned = all_gather_consume, produce_reduce_scatter, produce_all_reduce
    for (fused, _), twin in zip(PLANNERS, planned, strict=True):
        for world, chunks in ((2, 1), (3, 2), (4, 3)):
            sizes = [layout(each(1, world, chunks=chunks), {"workspace": 1000}).nbytes for each in (fused, twin)]
            assert 0 < sizes[0] <= sizes[1]


def test_the_kernel_starts_while_the_first_chunk_travels() -> None:
    """In a simulation with copies as long as tiles, the kernel hides everything except the first publication."""
    costs = Costs({"publish": 1.0, "pull": 10.0, "tiles": 10.0}, meet=0.0, tail=0.0)
    plans = [fused_all_gather_matmul(rank, 4) for rank in range(4)]
    assert simulate([plans], costs).makespan == pytest.approx(41.0)


def test_copies_on_the_stream_of_the_kernel_are_an_error() -> None:
    with pytest.raises(ValueError, match="copy is 'compute0', the stream of the kernel"):
        fused_all_gather_matmul(0, 2, copy="compute0")
    with pytest.raises(ValueError, match="need different ones"):
        fused_matmul_reduce_scatter(0, 2, sums="copy")
