"""The clock of the simulator, and the figures that it reports."""

import pytest

from symm_overlap.collective.planners import all_gather_consume, gather_then_consume, produce_reduce_scatter
from symm_overlap.collective.planners.published import torch_matmul_reduce_scatter
from symm_overlap.plan import (
    Costs,
    Region,
    Step,
    plan_calls,
    simulate,
    verify,
)

from .timelines import COMPUTES, COSTS, SEEDS, WORLD, by_hand, first_streams, one_rank, waited_at_barriers

FORK = Step("fork", "s")


class TestClock:
    def test_a_kernel_holds_the_sms_for_its_body_and_its_stream_for_its_tail_too(self):
        steps = [
            FORK,
            Step("consume", "s"),
            Step("reduce", "s"),
            Step("sleep", "t", after=(0,)),
            Step("consume", "t"),
            Step("join", "s", after=(4,)),
        ]
        timeline = simulate(one_rank(*steps), Costs({"consume": 1.0}, overhead=0.25, tail=0.5, sleep=0.125))
        times = {event.at.index: (event.start, event.end, event.waited) for event in timeline.events}
        assert times[1] == (0.0, 1.5, 0.0)
        assert times[4] == (1.0, 2.5, 0.875), "its body runs during the first one's tail"
        assert times[2] == (2.0, 2.25, 0.5), "its stream is free at 1.5, the SMs at 2"
        assert timeline.makespan == 2.5

    def test_a_step_that_consumes_every_shard_takes_as_long_as_their_steps_would(self):
        """One step that consumes four shards takes as long as four steps with one shard each, but has one tail."""
        timeline = simulate(plan_calls(gather_then_consume, 4, 1, in_place=True), Costs(compute=1.0, tail=0.5))
        (took,) = {event.end - event.start for event in timeline.events if event.at.step.kind == "consume"}
        assert took == pytest.approx(4.5)

    def test_copies_share_one_engine_and_leave_the_sms_alone(self):
        steps = [
            FORK,
            Step("pull", "s"),
            Step("pull", "t", after=(0,)),
            Step("consume", "u", after=(0,)),
            Step("join", "s", after=(2, 3)),
        ]
        timeline = simulate(one_rank(*steps), Costs(copy=0.4, compute=1.0, tail=0.0))
        times = {event.at.index: (event.start, event.end) for event in timeline.events}
        assert times[1] == (0.0, 0.4)
        assert times[2] == (0.4, 0.8)
        assert times[3] == (0.0, 1.0)

    def test_a_copy_that_is_a_kernel_competes_with_the_matmul(self):
        steps = [
            FORK,
            Step("publish", "s"),
            Step("consume", "s"),
            Step("consume", "t", after=(1,)),
            Step("join", "s", after=(3,)),
        ]
        on_engine = simulate(one_rank(*steps), COSTS)
        on_sms = simulate(one_rank(*steps), COSTS, on_sms=COMPUTES | {"publish"})
        assert on_engine.makespan == on_sms.makespan
        steps[1] = Step("consume", "t", after=(0,))
        steps[3] = Step("publish", "u", after=(0,))
        on_engine = simulate(one_rank(*steps), COSTS)
        on_sms = simulate(one_rank(*steps), COSTS, on_sms=COMPUTES | {"publish"})
        assert on_sms.makespan == pytest.approx(on_engine.makespan + 0.3)

    def test_a_wait_lasts_until_the_signal_has_come(self):
        sender = (FORK, Step("consume", "s"), Step("signal", "s", peers=(1,), channel=0), Step("join", "s"))
        waiter = (FORK, Step("wait", "s", peers=(0,), channel=0), Step("join", "s"))
        calls = [[by_hand(0, 2, *sender), by_hand(1, 2, *waiter)]]
        (wait,) = [event for event in simulate(calls, COSTS).events if event.at.step.kind == "wait"]
        assert (wait.start, wait.waited, wait.end) == (0.0, 1.26, pytest.approx(1.27))

    def test_one_step_tells_several_peers_and_one_waits_for_several(self):
        def plan(rank, work):
            peers = tuple(peer for peer in range(3) if peer != rank)
            meets = [Step(kind, "s", peers=peers, channel=0) for kind in ("signal", "wait")]
            return by_hand(rank, 3, FORK, *[Step("consume", "s")] * work, *meets, Step("join", "s"))

        calls = [[plan(rank, rank) for rank in range(3)]]
        verify(calls).raise_for_problems()
        timeline = simulate(calls, Costs(compute=1.0, tail=0.0, meet=0.5))
        ends = {event.at.rank: event.end for event in timeline.events if event.at.step.kind == "wait"}
        assert ends == {0: 3.0, 1: 3.0, 2: 3.0}, "the last signal is sent at 2.5"
        assert len(timeline.signals) == 6

    def test_nobody_leaves_a_barrier_before_the_last_has_arrived(self):
        def plan(rank, work):
            computes = [Step("consume", "s")] * work
            return by_hand(rank, 3, FORK, *computes, Step("barrier", "s", channel=0), Step("join", "s"))

        timeline = simulate([[plan(0, 1), plan(1, 3), plan(2, 0)]], Costs(compute=1.0, tail=0.0, meet=0.5))
        barriers = sorted(
            (event for event in timeline.events if event.at.step.kind == "barrier"), key=lambda event: event.at.rank
        )
        assert [event.end for event in barriers] == [3.5, 3.5, 3.5]
        assert [event.waited for event in barriers] == [2.0, 0.0, 3.0]

    def test_costs_may_be_a_function_of_rank_and_step(self):
        calls = plan_calls(torch_matmul_reduce_scatter, 2, 1)
        slow_rank = simulate(calls, lambda rank, step: (5.0 if rank == 1 and step.kind == "produce" else 0.0, 0.0))
        assert slow_rank.makespan == 10.0
        assert waited_at_barriers(slow_rank, 0) > 4.9
        assert waited_at_barriers(slow_rank, 1) == 0

    def test_a_seed_gives_the_same_timeline_again_and_seeds_differ(self):
        calls = plan_calls(torch_matmul_reduce_scatter, WORLD, 1, order=None)
        assert simulate(calls, COSTS, seed=3) == simulate(calls, COSTS, seed=3)
        assert len({tuple(first_streams(simulate(calls, COSTS, seed=seed))) for seed in SEEDS}) > 3

    def test_kernels_are_ready_together_whatever_the_rounding_of_sums(self):
        """0.1 + 0.2 and 0.3 count as the same time, so either kernel may start first."""
        steps = [
            FORK,
            Step("sleep", "s", label="0.1"),
            Step("sleep", "s", label="0.2"),
            Step("sleep", "t", label="0.3", after=(0,)),
            Step("consume", "s", label="1"),
            Step("consume", "t", label="1"),
        ]
        timelines = [
            simulate(one_rank(*steps), lambda rank, step: (float(step.label or 0), 0.0), seed=seed) for seed in SEEDS
        ]
        assert {tuple(first_streams(timeline, "consume")) for timeline in timelines} == {("s",), ("t",)}

    def test_calls_follow_each_other(self):
        one, three = (simulate(plan_calls(all_gather_consume, WORLD, calls), COSTS) for calls in (1, 3))
        assert 2.9 * one.makespan < three.makespan < 3.1 * one.makespan

    def test_plans_that_deadlock_are_refused(self):
        with pytest.raises(ValueError, match="deadlock"):
            simulate([[by_hand(0, 2, FORK, Step("wait", "s", peers=(1,), channel=0)), by_hand(1, 2, FORK)]])


class TestFigures:
    def test_what_is_reported_adds_up(self):
        timeline = simulate(plan_calls(produce_reduce_scatter, WORLD, 1), COSTS)
        assert timeline.compute == pytest.approx(4 * 1.0 + 0.25), "four chunks and one tail"
        assert timeline.communication == pytest.approx(3 * 0.3)
        assert timeline.exposed == pytest.approx(timeline.makespan - 4.25)
        assert timeline.efficiency == pytest.approx((4.25 + 0.9 - timeline.makespan) / 0.9)
        for rank in range(WORLD):
            assert timeline.busy[rank, "compute0"] == pytest.approx(4 * 1.25 + 0.1 + 3 * 0.01)
            assert timeline.busy[rank, "copy"] == pytest.approx(3 * 0.3 + 3 * 0.01)
        assert timeline.makespan == max(event.end for event in timeline.events)

    def test_the_matmul_alone_may_be_given(self):
        calls = plan_calls(produce_reduce_scatter, WORLD, 1)
        assert simulate(calls, COSTS, compute=4.0).exposed == simulate(calls, COSTS).exposed + 0.25

    def test_everything_hidden_is_an_efficiency_of_one_and_nothing_hidden_of_zero(self):
        region = Region("x", 0, 0, 1)
        pull = Step("pull", "c", writes=(region,), after=(0,))
        beside = [FORK, Step("consume", "s"), pull, Step("join", "s", after=(2,))]
        behind = [FORK, Step("consume", "s"), Step("pull", "s"), Step("join", "s")]
        assert simulate(one_rank(*beside), COSTS).efficiency == pytest.approx(1.0)
        assert simulate(one_rank(*behind), COSTS).efficiency == pytest.approx(0.0)

    def test_without_copies_there_is_no_efficiency(self):
        alone = simulate(one_rank(FORK, Step("consume", "s"), Step("join", "s")), COSTS)
        assert alone.efficiency is None
        assert "no overlap efficiency: nothing is copied" in str(alone)
        copies = simulate(one_rank(FORK, Step("pull", "s"), Step("join", "s")), COSTS)
        assert copies.efficiency is None
        assert "no overlap efficiency: nothing is computed" in str(copies)

    @pytest.mark.parametrize("in_place", [False, True])
    def test_where_peers_memory_is_used_in_place_there_is_no_efficiency(self, in_place):
        """The time of the matmul then includes communication, so copies are not all of the communication."""
        calls = plan_calls(all_gather_consume, WORLD, 1, copy="compute0", in_place=in_place)
        timeline = simulate(calls, COSTS)
        assert timeline.communication > 0, "shards are published"
        assert (timeline.efficiency is None) == timeline.in_place == in_place

    def test_the_summary_names_the_figures(self):
        text = str(simulate(plan_calls(produce_reduce_scatter, WORLD, 1), COSTS))
        for words in ("makespan", "exposed communication", "overlap efficiency", "compute0 busy", "copy busy"):
            assert words in text
