"""The planners' plans have no race and no deadlock and compute the right values. No synchronisation is redundant."""

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest

from symm_overlap.collective.planners import (
    ALL_GATHER_MATMUL,
    all_gather_consume,
    gather_then_consume,
    one_shot_all_reduce,
    produce_all_reduce,
    produce_reduce_scatter,
    produce_then_all_reduce,
    produce_then_reduce_scatter,
)
from symm_overlap.plan import Step, plan_calls, verify, verify_planner
from symm_overlap.plan.order import Order
from symm_overlap.plan.testing import redundant, synchronisations, without
from symm_overlap.plan.verify import find_problems

from .cases import OVERLAPPED, SEQUENTIAL, STREAMS, TWO, case_id, contracts_of, delays_copy, in_graphs

GATHER_OPTIONS = [
    {"keep": True},
    {"keep": True, "consume": False},
    {"accumulate": True},
    {"symmetric": True},
    {"symmetric": True, "keep": True},
    {"symmetric": True, "accumulate": True},
    {"outbound": "compute0"},
    {"outbound": "compute0", "symmetric": True, "keep": True},
    {"outbound": "compute0", "symmetric": True, "announce_offset": False},
    {"outbound": "compute0", "keep": True},
    {"outbound": "compute0", "keep": True, "consume": False},
    {"outbound": "compute0", "accumulate": True},
    {"outbound": "compute0", "accumulate": True, "keep": True},
    {"accumulate": True, "keep": True},
    {"symmetric": True, "keep": True, "consume": False},
]
CASES = [(planner, streams) for planner in OVERLAPPED for streams in STREAMS]
OPTION_CASES = [
    *((all_gather_consume, {**streams, **options}) for streams in STREAMS for options in GATHER_OPTIONS),
    *((produce_reduce_scatter, {**streams, "keep": True, "own": own}) for streams in STREAMS for own in (False, True)),
]
# Every option occurs with two of the seven choices of streams among the quick tests, and with five among the slow ones.
QUICK_AND_SLOW = [
    each if number % 7 in (0, 3) else pytest.param(*each, marks=pytest.mark.slow)
    for number, each in enumerate(OPTION_CASES)
]
SEQUENTIAL_CASES = [
    *((planner, {"in_place": in_place}) for planner in SEQUENTIAL for in_place in (False, True)),
    (gather_then_consume, {"keep": True}),
    (gather_then_consume, {"keep": True, "in_place": True}),
    (gather_then_consume, {"keep": True, "consume": False}),
    (gather_then_consume, {"symmetric": True}),
    (gather_then_consume, {"symmetric": True, "in_place": True}),
    (gather_then_consume, {"symmetric": True, "keep": True}),
    (gather_then_consume, {"symmetric": True, "keep": True, "consume": False}),
    (gather_then_consume, {"symmetric": True, "announce_offset": False}),
    *((produce_then_reduce_scatter, {"keep": True, "in_place": in_place}) for in_place in (False, True)),
]


# A test loops over sizes, because running thousands of tests would take as long as verifying their plans.


def holds(planner, world, **arguments):
    calls = plan_calls(planner, world, **arguments)
    contracts = contracts_of(calls, arguments.get("accumulate", False))
    found = verify(calls, graphs=in_graphs(calls), contracts=contracts)
    assert found.ok, f"{planner.__name__} for world {world}, {arguments}: {found}"


def nothing_is_idle(planner, world, **arguments):
    """Ranks differ only in their numbers, so it is enough to remove the synchronisations that rank 0 waits for."""
    calls = plan_calls(planner, world, **arguments)
    idle = [taken for taken in redundant(calls, [0], graphs=in_graphs(calls)) if not delays_copy(taken)]
    assert idle == [], f"{planner.__name__} for world {world}, {arguments}"


@pytest.mark.parametrize(
    "world", [*range(1, 9), *(pytest.param(world, marks=pytest.mark.slow) for world in range(9, 17))]
)
@pytest.mark.parametrize("planner", OVERLAPPED)
def test_plans_hold_for_every_world_size_and_chunk_count(planner, world):
    # Small worlds have all numbers of chunks and all choices of streams. Larger ones have every other number of chunks,
    # each with one choice of streams. Both change with the world size, so that every pair of them occurs.
    for chunks in range(1, 5) if world <= 5 else range(1 + world % 2, 5, 2):
        turn = (2 * OVERLAPPED.index(planner) + world + chunks) % len(STREAMS)
        for streams in STREAMS if world <= 5 else [STREAMS[turn]]:
            holds(planner, world, chunks=chunks, **streams)


@pytest.mark.parametrize(("planner", "arguments"), SEQUENTIAL_CASES, ids=case_id)
def test_sequential_plans_hold_for_every_world_size(planner, arguments):
    for world in (*range(1, 9), 12, 16):
        holds(planner, world, **arguments)


@pytest.mark.parametrize(("planner", "arguments"), QUICK_AND_SLOW, ids=case_id)
def test_the_options_of_all_gathers_and_reduce_scatters_hold(planner, arguments):
    for world, chunks in itertools.product((1, 2, 3, 5, 8), (1, 3)):
        holds(planner, world, chunks=chunks, **arguments)


@pytest.mark.parametrize(("planner", "arguments"), CASES + QUICK_AND_SLOW, ids=case_id)
def test_taking_out_any_synchronisation_makes_verify_fail(planner, arguments):
    larger = [(2, 1), (5, 2)] if (planner, arguments) in CASES else []  # for options, left out to save time
    for world, chunks in [(1, 2), (2, 3), (3, 2), (4, 1), *larger]:
        nothing_is_idle(planner, world, chunks=chunks, **arguments)


@pytest.mark.parametrize(("planner", "arguments"), SEQUENTIAL_CASES, ids=case_id)
def test_taking_out_any_synchronisation_of_a_sequential_plan_makes_verify_fail(planner, arguments):
    for world in (1, 2, 3, 5):
        nothing_is_idle(planner, world, **arguments)


@pytest.mark.parametrize("world", [8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("planner", OVERLAPPED)
def test_taking_out_synchronisation_makes_verify_fail_in_large_worlds_too(planner, world):
    calls = plan_calls(planner, world, chunks=2, compute=TWO)
    every = list(synchronisations(calls, [0]))
    for taken in every[:: len(every) // 12]:
        assert next(find_problems(without(calls, taken, everywhere=True), graphs=True), None), taken


@pytest.mark.parametrize(
    ("planner", "arguments"),
    [
        *((each, streams) for each in OVERLAPPED for streams in STREAMS),
        *((each, {"in_place": in_place}) for each in SEQUENTIAL for in_place in (False, True)),
    ],
    ids=case_id,
)
def test_a_signal_names_the_chunk_that_its_wait_waits_for(planner, arguments):
    """A signal and its wait are the two ends of an arrow in a drawing, so their labels must be equal."""
    pieces = {} if planner in SEQUENTIAL else {"chunks": 2}
    plans = [planner(rank, 3, **arguments, **pieces) for rank in range(3)]
    ends = {"signal": defaultdict(list), "wait": defaultdict(list)}
    for plan in plans:
        for step in plan.steps:
            if step.kind in ends:
                for peer in step.peers:
                    slot = (plan.rank, peer) if step.kind == "signal" else (peer, plan.rank)
                    ends[step.kind][(*slot, step.channel)].append((step.label, step.chunk and step.chunk[1]))
    assert ends["signal"] == ends["wait"]


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


@pytest.mark.parametrize(
    ("planner", "arguments"),
    [*((each, {"chunks": 2, "compute": TWO}) for each in OVERLAPPED), *((each, {}) for each in SEQUENTIAL)],
    ids=case_id,
)
def test_taking_out_one_half_of_a_pair_makes_verify_fail(planner, arguments):
    calls = plan_calls(planner, 3, **arguments)
    for index, step in enumerate(calls[0][0].steps):
        if step.kind in ("signal", "wait"):
            problems = verify(
                edited(calls, 0, index, lambda step: Step("sleep", step.stream, after=step.after))
            ).problems
            assert {problem.kind for problem in problems} & {"deadlock", "leftover signal"}, step


MIXES = [
    [all_gather_consume, produce_reduce_scatter, produce_all_reduce, all_gather_consume, produce_all_reduce],
    [produce_all_reduce, all_gather_consume, produce_reduce_scatter, produce_reduce_scatter, all_gather_consume],
]


@pytest.mark.parametrize("mix", MIXES, ids=["gather first", "all-reduce first"])
@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_a_mix_of_ops_on_one_workspace_needs_no_barrier_between_calls(world, streams, mix):
    calls = [plan_calls(planner, world, 1, chunks=1 + call % 3, **streams)[0] for call, planner in enumerate(mix)]
    verify(calls, graphs=in_graphs(calls), contracts=contracts_of(calls)).raise_for_problems()


PLANS = [
    (all_gather_consume, {"symmetric": True, "announce_offset": False}),
    (all_gather_consume, {"keep": True}),
    (gather_then_consume, {"in_place": True}),
    (gather_then_consume, {"symmetric": True, "in_place": True}),
    (produce_reduce_scatter, {"in_place": True}),
    (produce_all_reduce, {"chunks": 2, "compute": TWO}),
    (produce_then_reduce_scatter, {}),
    (produce_reduce_scatter, {"keep": True, "own": True}),
    (produce_then_all_reduce, {"in_place": True}),
    (one_shot_all_reduce, {}),
]


@pytest.mark.parametrize("second", PLANS, ids=lambda plan: f"{plan[0].__name__}-{case_id(plan[1])}")
@pytest.mark.parametrize("first", PLANS, ids=lambda plan: f"{plan[0].__name__}-{case_id(plan[1])}")
def test_any_plan_may_take_over_the_half_that_any_other_has_used(first, second):
    """Calls with any two plans may follow each other on one half of the workspace."""
    calls = [
        plan_calls(planner, 3, 1, **arguments)[0] for planner, arguments in (first, PLANS[1], second, first, second)
    ]
    verify(calls, graphs=in_graphs(calls), contracts=contracts_of(calls)).raise_for_problems()


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_rank_has_left_a_call_before_any_rank_starts_the_next_but_one(world, streams):
    """So a call may use any layout of its half of the workspace, whatever the call before last stored there."""
    mix = [produce_all_reduce, all_gather_consume, produce_reduce_scatter, all_gather_consume, produce_all_reduce]
    check_that_ranks_leave([plan_calls(planner, world, 1, **streams)[0] for planner in mix])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_rank_has_left_a_sequential_call_before_any_rank_starts_the_next_but_one(world, in_place):
    mix = [*SEQUENTIAL, *SEQUENTIAL]
    check_that_ranks_leave([plan_calls(planner, world, 1, in_place=in_place)[0] for planner in mix])


def check_that_ranks_leave(calls):
    order = Order(calls)
    number = {(at.call, at.rank, at.step.kind): number for number, at in enumerate(order.where)}
    for call in range(len(calls) - 2):
        for left, started in itertools.product(range(len(calls[0])), repeat=2):
            assert order.before(number[call, left, "join"], number[call + 2, started, "fork"])
            if left != started:
                assert not order.before(number[call, left, "join"], number[call + 1, started, "fork"])


@pytest.mark.parametrize("planner", OVERLAPPED)
def test_the_sleep_orders_nothing(planner):
    """The sleep is only a hint: the plan has the same steps and is correct without it."""
    for rank in range(4):
        with_it, without_it = (planner(rank, 4, chunks=2, compute=TWO, sleep=sleep).steps for sleep in (True, False))
        assert [step for step in without_it if step.kind == "sleep"] == []
        stripped = [replace(step, after=()) for step in with_it if step.kind != "sleep"]
        assert stripped == [replace(step, after=()) for step in without_it]
    verify_planner(planner, 5, chunks=2, compute=TWO, sleep=False).raise_for_problems()


@pytest.mark.parametrize(
    ("planner", "writes"),
    [
        (all_gather_consume, "publish"),
        (gather_then_consume, "publish"),
        (produce_reduce_scatter, "produce"),
        (produce_then_reduce_scatter, "produce"),
    ],
)
def test_one_workspace_for_all_calls_would_race(planner, writes):
    """The double buffer replaces barriers: without it, a fast rank overwrites data that a slow rank still reads."""
    problems = verify(plan_calls(planner, 2, 2), halves=[0, 0]).problems
    races = [problem for problem in problems if problem.kind == "data race"]
    assert races
    reader, writer = races[0].steps
    assert (reader.step.kind, reader.call) == ("pull", 0)
    assert (writer.step.kind, writer.call) == (writes, 1)
    assert reader.rank != writer.rank


def test_a_report_can_be_read():
    good = verify_planner(all_gather_consume, 2)
    assert str(good) == "54 steps: no deadlock, no race, every output written once"
    good = verify_planner(all_gather_consume, 2, contract=ALL_GATHER_MATMUL)
    assert str(good) == "54 steps: no deadlock, no race, every output written once with the right values"
    bad = verify(plan_calls(all_gather_consume, 4, chunks=4), halves=[0, 0, 0])
    assert not bad.ok
    text = str(bad)
    assert "data race: the write to workspace@" in text
    assert "reuses the half of the workspace where workspace@" in text
    assert "call 0, rank 0, step" in text
    assert f"... and {len(bad.problems) - 10} more" in text
