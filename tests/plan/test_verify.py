"""The planners' plans hold, no synchronisation in them is idle, and broken plans are refused for the right reason."""

import itertools
from dataclasses import replace

import pytest

from symm_overlap.plan import (
    Plan,
    Region,
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

from .torch_planner import torch_all_gather_matmul, torch_matmul_reduce_scatter

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


class TestTorchsAlgorithm:
    @pytest.mark.parametrize("world", [2, 3, 4, 8])
    def test_all_gather_holds_and_one_of_its_three_barriers_is_redundant(self, world):
        calls = plan_calls(torch_all_gather_matmul, world)
        verify(calls).raise_for_problems()
        assert [each.at[0].step.label for each in redundant(calls)] == ["[workspace free]", "[all read]"]
        verify_planner(torch_all_gather_matmul, world, first=False).raise_for_problems()
        verify_planner(torch_all_gather_matmul, world, last=False).raise_for_problems()

    @pytest.mark.parametrize("world", [2, 3, 4, 8])
    def test_reduce_scatter_holds_and_four_of_its_barriers_are_redundant(self, world):
        calls = plan_calls(torch_matmul_reduce_scatter, world)
        verify(calls).raise_for_problems()
        assert sum(step.kind == "barrier" for step in calls[0][0].steps) == 2 * (world - 1) + 2
        found = {each.at[0].step.label for each in redundant(calls, [0])}
        assert found == {
            "[workspace free]",
            "[all read]",
            *(f"[pulled {step}]" for step in (world - 2, world - 1) if step > 0),
        }

    def test_all_gather_without_a_barrier_between_calls_is_refused_and_the_pair_is_named(self):
        report = verify_planner(torch_all_gather_matmul, 4, first=False, last=False)
        races = [problem for problem in report.problems if problem.kind == "data race"]
        assert races
        for race in races:
            pull, publish = race.steps
            assert (pull.step.kind, publish.step.kind) == ("pull", "publish")
            assert publish.call == pull.call + 1
            assert publish.rank == pull.step.peer
        with pytest.raises(ValueError, match=r"data race(.|\n)*pull chunk 1.0(.|\n)*publish chunk 1.0"):
            report.raise_for_problems()

    def test_reduce_scatter_without_a_barrier_between_calls_is_refused_and_the_pair_is_named(self):
        report = verify_planner(torch_matmul_reduce_scatter, 4, first=False, last=False, pulled=False)
        pairs = {tuple((at.step.kind, at.call) for at in problem.steps) for problem in report.problems}
        assert (("pull", 0), ("produce", 1)) in pairs


def edited(calls, rank, index, change):
    """``calls`` with one step of one rank changed in every call."""
    result = []
    for plans in calls:
        steps = list(plans[rank].steps)
        steps[index] = change(steps[index])
        result.append([replace(plan, steps=tuple(steps)) if plan.rank == rank else plan for plan in plans])
    return result


def one_rank(*steps):
    return [[Plan("made_by_hand", 0, 1, 0, steps)]]


def two_ranks(first, second):
    return [[Plan("made_by_hand", 0, 2, 0, tuple(first)), Plan("made_by_hand", 1, 2, 0, tuple(second))]]


def kinds_of(calls):
    return [problem.kind for problem in verify(calls).problems]


X, Y = Region("x", 0, 0, 1), Region("y", 0, 0, 2)
FORK, JOIN = Step("fork", "s"), Step("join", "s")


class TestBrokenPlans:
    def test_a_ring_of_waits_is_a_deadlock_and_names_the_ring(self):
        ranks = [
            [FORK, Step("wait", "s", peer=1 - me, channel=0), Step("signal", "s", peer=1 - me, channel=0), JOIN]
            for me in range(2)
        ]
        (problem,) = verify(two_ranks(*ranks)).problems
        assert problem.kind == "deadlock"
        assert {(at.rank, at.step.kind) for at in problem.steps} == {(0, "wait"), (1, "wait")}

    def test_a_wait_that_nobody_signals_is_a_deadlock(self):
        calls = two_ranks([FORK, Step("wait", "s", peer=1, channel=0), JOIN], [FORK, JOIN])
        (problem,) = verify(calls).problems
        assert problem.kind == "deadlock"
        assert problem.steps[0].index == 1

    def test_a_barrier_that_one_rank_does_not_reach_is_a_deadlock(self):
        barrier = Step("barrier", "s", channel=0)
        assert kinds_of(two_ranks([FORK, barrier, JOIN], [FORK, JOIN])) == ["deadlock"]
        assert kinds_of(two_ranks([FORK, barrier, JOIN], [FORK, barrier, JOIN])) == []

    def test_barriers_in_another_order_are_a_deadlock(self):
        one, two = Step("barrier", "s", channel=0), Step("barrier", "s", channel=1)
        assert kinds_of(two_ranks([FORK, one, two, JOIN], [FORK, two, one, JOIN])) == ["deadlock"]

    def test_a_signal_that_nobody_waits_for_is_left_over(self):
        calls = two_ranks([FORK, Step("signal", "s", peer=1, channel=2), JOIN], [FORK, JOIN])
        assert kinds_of(calls) == ["leftover signal"]

    def test_two_streams_on_one_slot_are_refused(self):
        def signal(stream, after=()):
            return Step("signal", stream, peer=1, channel=0, after=after)

        wait = Step("wait", "s", peer=0, channel=0)
        waits = [FORK, wait, wait, JOIN]
        assert kinds_of(two_ranks([FORK, signal("s"), signal("t", (0,)), replace(JOIN, after=(2,))], waits)) == [
            "unordered signals"
        ]
        assert kinds_of(two_ranks([FORK, signal("s"), signal("t", (1,)), replace(JOIN, after=(2,))], waits)) == []
        signals = [FORK, replace(signal("s"), peer=0), replace(signal("s"), peer=0), JOIN]
        waits = [FORK, replace(wait, peer=1), replace(wait, peer=1, stream="t", after=(0,)), replace(JOIN, after=(2,))]
        assert kinds_of(two_ranks(waits, signals)) == ["unordered waits"]

    def test_writes_and_reads_of_two_streams_race(self):
        for first, second in [("writes", "writes"), ("writes", "reads"), ("reads", "writes")]:
            steps = [
                Step("fork", "s", writes=(X, Y)),
                Step("pull", "s", **{first: (X,)}),
                Step("pull", "t", after=(0,), **{second: (X,)}),
                Step("join", "s", after=(2,)),
            ]
            (problem,) = verify(one_rank(*steps)).problems
            assert problem.kind == "data race"
            assert {at.index for at in problem.steps} == {1, 2}
            steps[2] = replace(steps[2], after=(1,))
            assert kinds_of(one_rank(*steps)) == []

    def test_two_reads_do_not_race(self):
        reads = [Step("pull", "s", reads=(X,)), Step("pull", "t", reads=(X,), after=(0,))]
        assert kinds_of(one_rank(Step("fork", "s", writes=(X,)), *reads, Step("join", "s", after=(2,)))) == []

    def test_a_race_with_a_write_behind_ordered_ones_is_found(self):
        """The read is compared with the last write only; the race with it must not hide behind one that is ordered."""
        steps = [
            Step("fork", "s", writes=(X,)),
            Step("pull", "t", reads=(X,), after=(0,)),
            Step("pull", "s", writes=(X,)),
            Step("pull", "s", writes=(X,)),
            Step("join", "s", after=(1,)),
        ]
        assert kinds_of(one_rank(*steps)) == ["data race"]

    def test_memory_of_the_last_call_is_stale(self):
        writes = [[Plan("a", 0, 1, 0, (Step("fork", "s", writes=(X,)), JOIN))]]
        reads = [[Plan("b", 0, 1, 0, (FORK, Step("join", "s", reads=(X,))))]]
        assert kinds_of(writes + reads) == ["stale read"]
        assert kinds_of(reads) == ["stale read"], "memory that nobody has written"

    def test_a_part_of_an_output_that_is_not_written_is_stale(self):
        write = Step("consume", "s", writes=(Region("y", 0, 0, 1),))
        assert kinds_of(one_rank(FORK, write, Step("join", "s", reads=(Y,)))) == ["stale read"]

    def test_an_output_is_written_once_but_may_be_added_to(self):
        write, add = Step("consume", "s", writes=(X,)), Step("consume", "s", reads=(X,), writes=(X,))
        join = Step("join", "s", reads=(X,))
        assert kinds_of(one_rank(FORK, write, write, join)) == ["written twice"]
        assert kinds_of(one_rank(FORK, write, add, add, join)) == []

    def test_a_stream_that_leaves_the_call_is_refused(self):
        pull = Step("pull", "t", after=(0,))
        assert kinds_of(one_rank(FORK, pull, JOIN)) == ["unjoined"]
        assert kinds_of(one_rank(FORK, replace(pull, after=()), replace(JOIN, after=(1,)))) == ["unforked"]
        assert kinds_of(one_rank(FORK, pull, replace(JOIN, after=(1,)))) == []

    @pytest.mark.parametrize(
        ("step", "said"),
        [
            (Step("teleport", "s"), "kind 'teleport' is none of"),
            (Step("pull", "s", after=(5,)), "after is (5,)"),
            (Step("pull", "s", after=(0,)), "after is (0,)"),
            (Step("signal", "s", peer=0, channel=0), "peer is 0"),
            (Step("wait", "s", peer=2, channel=0), "peer is 2"),
            (Step("wait", "s", peer=1), "channel is None"),
            (Step("barrier", "s", channel=4), "channel is 4"),
            (Step("sleep", "s", reads=(X,)), "a sleep reads and writes nothing"),
            (Step("pull", "s", reads=(Region("x", 7, 0, 1),)), "no such region: x@7[0]"),
            (Step("pull", "s", reads=(Region("x", 0, 1, 1),)), "no such region"),
        ],
    )
    def test_what_no_executor_could_run_is_malformed(self, step, said):
        (problem,) = verify(two_ranks([FORK, step, JOIN], [FORK, JOIN])).problems
        assert problem.kind == "malformed"
        assert said in str(problem)

    def test_plans_must_be_whole_and_complete(self):
        plan = Plan("made_by_hand", 0, 2, 0, (FORK, JOIN))
        assert kinds_of([[plan]]) == ["malformed"], "rank 1 of 2 is missing"
        assert kinds_of([[plan, plan]]) == ["malformed"], "rank 0 twice"
        assert kinds_of(one_rank(FORK)) == ["malformed"]
        assert kinds_of(one_rank(FORK, Step("join", "t", after=(0,)))) == ["malformed"]


def test_a_report_can_be_read():
    good = verify_planner(all_gather_consume, 2)
    assert str(good) == "54 steps: no deadlock, no race, every output written once"
    bad = verify([[all_gather_consume(rank, 4, chunks=4) for rank in range(4)]] * 3)
    assert not bad.ok
    text = str(bad)
    assert "data race: nothing orders these two accesses to workspace0@" in text
    assert "call 0, rank 0, step" in text
    assert f"... and {len(bad.problems) - 10} more" in text
