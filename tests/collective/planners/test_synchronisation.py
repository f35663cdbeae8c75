"""The planners' plans hold, and no synchronisation in them is idle."""

import itertools
from dataclasses import replace

import pytest

from symm_overlap.plan import (
    Step,
    all_gather_consume,
    plan_calls,
    produce_all_reduce,
    produce_reduce_scatter,
    redundant,
    verify,
    verify_planner,
)
from symm_overlap.plan.order import Order
from symm_overlap.plan.redundant import synchronisations, without

TWO = ("compute0", "compute1")
STREAMS = [
    {"copy": "compute0"},
    {"copy": "compute0", "direct": True},
    {"copy": "copy"},
    {"copy": "copy", "compute": TWO},
    {"copy": "copy", "compute": TWO, "direct": True},
]
GATHER_OPTIONS = [
    {"keep": True},
    {"keep": True, "consume": False},
    {"accumulate": True},
    {"symmetric": True},
    {"symmetric": True, "keep": True},
    {"symmetric": True, "accumulate": True},
    {"outbound": "compute0"},
    {"outbound": "compute0", "symmetric": True, "keep": True},
    {"outbound": "compute0", "keep": True},
    {"outbound": "compute0", "keep": True, "consume": False},
    {"outbound": "compute0", "accumulate": True},
    {"outbound": "compute0", "accumulate": True, "keep": True},
    {"accumulate": True, "keep": True},
    {"symmetric": True, "keep": True, "consume": False},
]
CASES = [
    *((planner, streams) for planner in (produce_reduce_scatter, produce_all_reduce) for streams in STREAMS),
    *((all_gather_consume, streams) for streams in STREAMS),
]
OPTION_CASES = [(all_gather_consume, {**streams, **options}) for streams in STREAMS for options in GATHER_OPTIONS]


def case_id(value):
    if isinstance(value, dict):
        return "-".join(f"{key}={len(each) if key == 'compute' else each}" for key, each in value.items())
    return getattr(value, "__name__", None)


@pytest.mark.parametrize("world", range(1, 17))
@pytest.mark.parametrize(("planner", "arguments"), CASES, ids=case_id)
def test_plans_hold_for_every_world_size_and_chunk_count(planner, arguments, world):
    for chunks in range(1, 5):
        verify_planner(planner, world, chunks=chunks, **arguments).raise_for_problems()


@pytest.mark.parametrize(("planner", "arguments"), OPTION_CASES, ids=case_id)
def test_the_all_gathers_options_hold(planner, arguments):
    for world in (1, 2, 3, 5, 8):
        for chunks in (1, 3):
            verify_planner(planner, world, chunks=chunks, **arguments).raise_for_problems()


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
def test_reduce_scatters_that_produce_at_once_hold_and_none_of_their_synchronisation_is_idle(streams):
    for world in range(1, 17):
        verify_planner(produce_reduce_scatter, world, at_once=True, **streams).raise_for_problems()
    for world in (2, 3, 5):
        assert redundant(plan_calls(produce_reduce_scatter, world, at_once=True, **streams), [0]) == []


@pytest.mark.parametrize("options", [{}, {"symmetric": True}], ids=case_id)
@pytest.mark.parametrize("streams", [STREAMS[1], {"copy": "copy", "direct": True}, STREAMS[4]], ids=case_id)
def test_all_gathers_that_consume_shards_at_once_hold_and_none_of_their_synchronisation_is_idle(streams, options):
    for world in range(1, 17):
        verify_planner(all_gather_consume, world, at_once=True, **streams, **options).raise_for_problems()
    for world in (2, 3, 5):
        assert redundant(plan_calls(all_gather_consume, world, at_once=True, **streams, **options), [0]) == []


@pytest.mark.parametrize(("planner", "arguments"), CASES + OPTION_CASES, ids=case_id)
def test_taking_out_any_synchronisation_makes_verify_fail(planner, arguments):
    """All ranks do the same but for their number, so it is enough to take out what rank 0 waits for."""
    for world, chunks in [(1, 2), (2, 1), (2, 3), (3, 2), (4, 1), (5, 2)]:
        calls = plan_calls(planner, world, chunks=chunks, **arguments)
        assert redundant(calls, [0]) == [], f"world {world}, {chunks} chunks"


@pytest.mark.parametrize("world", [8, 16])
@pytest.mark.parametrize("planner", [all_gather_consume, produce_reduce_scatter, produce_all_reduce])
def test_taking_out_synchronisation_makes_verify_fail_in_large_worlds_too(planner, world):
    calls = plan_calls(planner, world, chunks=2, compute=TWO)
    every = list(synchronisations(calls, [0]))
    for taken in every[:: len(every) // 12]:
        assert not verify(without(calls, taken)).ok, taken


def test_the_search_can_be_limited_to_what_some_ranks_wait_for():
    calls = plan_calls(produce_all_reduce, 4)
    every, of_one = (list(synchronisations(calls, ranks)) for ranks in (None, [2]))
    assert len(every) == 4 * len(of_one)
    assert {each.at[-1].rank for each in of_one} == {2}


def edited(calls, rank, index, change):
    """``calls`` with one step of one rank changed in every call."""
    result = []
    for plans in calls:
        steps = list(plans[rank].steps)
        steps[index] = change(steps[index])
        result.append([replace(plan, steps=tuple(steps)) if plan.rank == rank else plan for plan in plans])
    return result


@pytest.mark.parametrize("planner", [all_gather_consume, produce_reduce_scatter, produce_all_reduce])
def test_taking_out_one_half_of_a_pair_makes_verify_fail(planner):
    calls = plan_calls(planner, 3, chunks=2, compute=TWO)
    for index, step in enumerate(calls[0][0].steps):
        if step.kind in ("signal", "wait"):
            problems = verify(
                edited(calls, 0, index, lambda step: Step("sleep", step.stream, after=step.after))
            ).problems
            assert {problem.kind for problem in problems} & {"deadlock", "leftover signal"}, step


def test_a_mix_of_ops_on_one_workspace_needs_no_barrier_between_calls():
    mixes = [
        [all_gather_consume, produce_reduce_scatter, produce_all_reduce, all_gather_consume, produce_all_reduce],
        [produce_all_reduce, all_gather_consume, produce_reduce_scatter, produce_reduce_scatter, all_gather_consume],
    ]
    for streams in STREAMS:
        for mix in mixes:
            for world in (1, 2, 3, 5, 8):
                calls = [
                    [planner(rank, world, chunks=1 + call % 3, parity=call % 2, **streams) for rank in range(world)]
                    for call, planner in enumerate(mix)
                ]
                verify(calls).raise_for_problems()
    calls = [
        [all_gather_consume(rank, 3, parity=call % 2, **arguments) for rank in range(3)]
        for call, arguments in enumerate(
            [{"symmetric": True}, {"direct": True}, {"symmetric": True, "direct": True}, {}, {"keep": True}]
        )
    ]
    verify(calls).raise_for_problems()


def test_every_rank_has_left_a_call_before_any_rank_starts_the_next_but_one():
    """So a call may lay out its half of the workspace as it likes, whatever the call before last had there."""
    mix = [produce_all_reduce, all_gather_consume, produce_reduce_scatter, all_gather_consume, produce_all_reduce]
    for streams in STREAMS:
        for world in (2, 3, 5):
            calls = [
                [planner(rank, world, parity=call % 2, **streams) for rank in range(world)]
                for call, planner in enumerate(mix)
            ]
            order = Order(calls)
            number = {(at.call, at.rank, at.step.kind): number for number, at in enumerate(order.where)}
            for call in range(len(mix) - 2):
                for left, started in itertools.product(range(world), repeat=2):
                    assert order.before(number[call, left, "join"], number[call + 2, started, "fork"])
                    if left != started:
                        assert not order.before(number[call, left, "join"], number[call + 1, started, "fork"])


@pytest.mark.parametrize("planner", [all_gather_consume, produce_reduce_scatter, produce_all_reduce])
def test_the_sleep_orders_nothing(planner):
    """It may be left out: what holds without it, holds with it."""
    for rank in range(4):
        with_it, without_it = (planner(rank, 4, chunks=2, compute=TWO, sleep=sleep).steps for sleep in (True, False))
        assert [step for step in without_it if step.kind == "sleep"] == []
        stripped = [replace(step, after=()) for step in with_it if step.kind != "sleep"]
        assert stripped == [replace(step, after=()) for step in without_it]
    verify_planner(planner, 5, chunks=2, compute=TWO, sleep=False).raise_for_problems()


@pytest.mark.parametrize("planner", [all_gather_consume, produce_reduce_scatter])
def test_one_workspace_for_all_calls_would_race(planner):
    """The double buffer makes up for barriers: without it, a fast rank overwrites what a slow one still reads."""
    calls = [[planner(rank, 2, parity=0) for rank in range(2)] for _ in range(2)]
    problems = verify(calls).problems
    races = [problem for problem in problems if problem.kind == "data race"]
    assert races
    reader, writer = races[0].steps
    assert (reader.step.kind, reader.call) == ("pull", 0)
    assert (writer.step.kind, writer.call) == ("publish" if planner is all_gather_consume else "produce", 1)
    assert reader.rank != writer.rank


def test_all_reduce_alone_would_not_need_a_second_workspace():
    """Whoever sends its sum has read all partial results. Its double buffer is for the calls of other ops around it."""
    for streams in STREAMS:
        verify([[produce_all_reduce(rank, 4, chunks=2, **streams) for rank in range(4)]] * 3).raise_for_problems()


def test_a_report_can_be_read():
    good = verify_planner(all_gather_consume, 2)
    assert str(good) == "54 steps: no deadlock, no race, every output written once"
    bad = verify([[all_gather_consume(rank, 4, chunks=4) for rank in range(4)]] * 3)
    assert not bad.ok
    text = str(bad)
    assert "data race: nothing orders these two accesses to workspace0@" in text
    assert "call 0, rank 0, step" in text
    assert f"... and {len(bad.problems) - 10} more" in text
