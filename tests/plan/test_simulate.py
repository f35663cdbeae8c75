"""The simulator's clock, and with it the pictures that explain why plans are scheduled the way they are."""

from dataclasses import replace

import pytest

from symm_overlap.plan import (
    Costs,
    Plan,
    Region,
    Step,
    all_gather_consume,
    plan_calls,
    produce_all_reduce,
    produce_reduce_scatter,
    simulate,
    verify,
)
from symm_overlap.plan.step import COMPUTES

from .torch_planner import torch_all_gather_matmul, torch_matmul_reduce_scatter

TWO = ("compute0", "compute1")
WORLD = 4
COSTS = Costs(produce=1.0, consume=1.0, tail=0.25, copy=0.3, latency=0.01, sleep=0.001)
SEEDS = range(12)


def first_streams(timeline, kind="produce"):
    """On each rank, the stream of the first kernel of a kind to start."""
    first = {}
    for event in timeline.events:
        if event.at.step.kind == kind:
            first.setdefault(event.at.rank, event.at.step.stream)
    return [first[rank] for rank in range(len(first))]


def waited_at_barriers(timeline, rank):
    return sum(event.waited for event in timeline.events if event.at.rank == rank and event.at.step.kind == "barrier")


def one_rank(*steps):
    return [[Plan("made_by_hand", 0, 1, 0, steps)]]


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
        timeline = simulate(one_rank(*steps), Costs(consume=1.0, reduce=0.25, tail=0.5, sleep=0.125))
        times = {event.at.index: (event.start, event.end, event.waited) for event in timeline.events}
        assert times[1] == (0.0, 1.5, 0.0)
        assert times[4] == (1.0, 2.5, 0.875), "its body runs during the first one's tail"
        assert times[2] == (2.0, 2.25, 0.5), "its stream is free at 1.5, the SMs at 2"
        assert timeline.makespan == 2.5

    def test_a_step_that_consumes_every_shard_takes_as_long_as_their_steps_would(self):
        calls = [[all_gather_consume(rank, 4, at_once=True, direct=True) for rank in range(4)]]
        timeline = simulate(calls, Costs(consume=1.0, tail=0.5))
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
        timeline = simulate(one_rank(*steps), Costs(copy=0.4, consume=1.0, tail=0.0))
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
        sender = (FORK, Step("consume", "s"), Step("signal", "s", peer=1, channel=0), Step("join", "s"))
        waiter = (FORK, Step("wait", "s", peer=0, channel=0), Step("join", "s"))
        calls = [[Plan("a", 0, 2, 0, sender), Plan("a", 1, 2, 0, waiter)]]
        (wait,) = [event for event in simulate(calls, COSTS).events if event.at.step.kind == "wait"]
        assert (wait.start, wait.waited, wait.end) == (0.0, 1.26, pytest.approx(1.27))

    def test_nobody_leaves_a_barrier_before_the_last_has_arrived(self):
        def plan(rank, work):
            return Plan(
                "a",
                rank,
                3,
                0,
                (FORK, *[Step("consume", "s")] * work, Step("barrier", "s", channel=0), Step("join", "s")),
            )

        timeline = simulate([[plan(0, 1), plan(1, 3), plan(2, 0)]], Costs(consume=1.0, tail=0.0, latency=0.5))
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
            simulate([[Plan("a", 0, 2, 0, (FORK, Step("wait", "s", peer=1, channel=0))), Plan("a", 1, 2, 0, (FORK,))]])


def copy(source, target, stream="s"):
    """A copy between two ranks, or within one; who makes it depends on whose plan it is in."""
    reads, writes = (Region("x", source, 0, 1),), (Region("y", target, 0, 1),)
    return Step("pull", stream, reads, writes, after=() if stream == "s" else (0,))


def run_copies(*ranks, **arguments):
    """A rank for each list of copies; the events of the copies as {(rank, index in the list): (start, end)}."""
    plans = [Plan("a", rank, len(ranks), 0, (FORK, *copies)) for rank, copies in enumerate(ranks)]
    timeline = simulate([plans], **({"costs": Costs(copy=1.0)} | arguments))
    return {
        (event.at.rank, event.at.index - 1): (event.start, event.end)
        for event in timeline.events
        if event.at.step.kind == "pull"
    }


def waited_for_links(timeline):
    """How long copies waited, where one stream makes all copies of a rank: so they never wait for their engine."""
    copies = [event for event in timeline.events if event.at.step.kind in ("publish", "pull")]
    assert len({(event.at.rank, event.at.step.stream) for event in copies}) == len({event.at.rank for event in copies})
    return sum(event.waited for event in copies)


def in_rank_order(plan):
    """The same all-gather, but every rank takes the shards of its peers in the order of their ranks."""

    def owner(index):
        step = plan.steps[index]
        if step.kind == "join":
            return plan.world
        return step.chunk[0] if step.chunk is not None and step.chunk[0] != plan.rank else -1

    order = sorted(range(len(plan.steps)), key=owner)
    steps = [plan.steps[index] for index in order]
    steps = [replace(step, after=tuple(sorted(map(order.index, step.after)))) for step in steps]
    others = [index for index, step in enumerate(steps) if step.stream != steps[-1].stream]
    steps[-1] = replace(steps[-1], after=tuple(others))  # the last ones of each stream are not the same as before
    return replace(plan, steps=tuple(steps))


class TestLinks:
    AS_LONG = Costs(produce=1.0, consume=1.0, copy=1.0, reduce=0.1, tail=0.0, latency=0.001)
    """Copies as long as matmuls, which is as long as they can be and still be hidden."""

    @pytest.mark.parametrize("on_sms", [COMPUTES, COMPUTES | {"pull"}])
    def test_two_ranks_that_pull_from_one_peer_take_twice_as_long_as_from_two(self, on_sms):
        apart = run_copies([copy(2, 0)], [copy(3, 1)], [], [], on_sms=on_sms)
        assert apart == {(0, 0): (0.0, 1.0), (1, 0): (0.0, 1.0)}
        assert sorted(run_copies([copy(2, 0)], [copy(2, 1)], [], [], on_sms=on_sms).values()) == [(0, 1), (1, 2)]

    def test_two_ranks_that_push_to_one_peer_share_its_way_in(self):
        assert run_copies([copy(0, 2)], [copy(1, 3)], [], []) == {(0, 0): (0.0, 1.0), (1, 0): (0.0, 1.0)}
        assert run_copies([copy(0, 2)], [copy(1, 2)], [], []) == {(0, 0): (0.0, 1.0), (1, 0): (1.0, 2.0)}

    def test_a_pull_and_a_push_meet_on_a_link_too(self):
        into_0 = run_copies([copy(1, 0)], [], [copy(2, 0)])
        assert into_0 == {(0, 0): (0.0, 1.0), (2, 0): (1.0, 2.0)}
        out_of_0 = run_copies([copy(0, 1)], [], [copy(0, 2)])
        assert out_of_0 == {(0, 0): (0.0, 1.0), (2, 0): (1.0, 2.0)}

    def test_the_ways_in_and_out_are_apart(self):
        assert set(run_copies([copy(1, 0)], [copy(2, 1)], [copy(0, 2)]).values()) == {(0.0, 1.0)}

    def test_a_copy_within_a_rank_uses_no_link(self):
        assert set(run_copies([copy(1, 0)], [copy(1, 1)], [copy(0, 2)]).values()) == {(0.0, 1.0)}

    def test_a_copy_that_waits_for_one_link_does_not_hold_the_other(self):
        times = run_copies([copy(2, 0)], [copy(2, 1)], [], [copy(3, 1)])
        assert times[3, 0] == (0.0, 1.0), "rank 1, next on rank 2's way out, has not begun to use its own way in"
        assert times[1, 0] == (1.0, 2.0)

    def test_a_copy_that_waits_for_a_link_holds_up_those_behind_it_on_its_engine(self):
        times = run_copies([copy(2, 0)], [copy(2, 1), copy(1, 1, "t")], [])
        assert times == {(0, 0): (0.0, 1.0), (1, 0): (1.0, 2.0), (1, 1): (2.0, 3.0)}

    def test_a_link_goes_to_who_asked_first_not_to_the_lower_rank(self):
        def costs(rank, step):
            return float(step.kind == "pull" and 1 + rank), 0.0

        times = run_copies([copy(0, 0), copy(3, 0)], [copy(3, 1)], [copy(3, 2)], [], costs=costs)
        assert times == {(0, 0): (0.0, 1.0), (1, 0): (0.0, 2.0), (2, 0): (2.0, 5.0), (0, 1): (5.0, 6.0)}

    @pytest.mark.parametrize("chunks", [1, 2])
    @pytest.mark.parametrize("compute", [TWO[:1], TWO])
    @pytest.mark.parametrize("world", [2, 3, 4, 8])
    def test_neighbours_first_gathers_without_contention_and_rank_0_first_does_not(self, world, compute, chunks):
        (plans,) = plan_calls(all_gather_consume, world, 1, compute=compute, chunks=chunks)
        jammed = [in_rank_order(plan) for plan in plans]
        assert verify([jammed]).ok
        for seed in SEEDS:
            ours, theirs = (simulate([each], self.AS_LONG, seed=seed) for each in (plans, jammed))
            assert waited_for_links(ours) == pytest.approx(0.0)
            assert ours.exposed < 1.1, "no more than publishing"
            if world > 2:  # otherwise the orders are the same
                assert waited_for_links(theirs) > 1.0
                assert theirs.makespan > ours.makespan + (world - 2) * 0.9

    @pytest.mark.parametrize("planner", [produce_reduce_scatter, produce_all_reduce])
    @pytest.mark.parametrize("chunks", [1, 2])
    @pytest.mark.parametrize("compute", [TWO[:1], TWO])
    @pytest.mark.parametrize("world", [2, 3, 4, 8])
    def test_our_reductions_have_no_contention(self, planner, world, compute, chunks):
        calls = plan_calls(planner, world, 1, compute=compute, chunks=chunks)
        for seed in SEEDS:
            assert waited_for_links(simulate(calls, self.AS_LONG, seed=seed)) == pytest.approx(0.0)

    def test_a_seed_gives_the_same_timeline_again_where_links_are_contended(self):
        calls = [
            [in_rank_order(plan) for plan in plan_calls(all_gather_consume, WORLD, 1, compute=TWO, sleep=False)[0]]
        ]
        on_sms = COMPUTES | {"publish", "pull"}
        once, again = ([simulate(calls, COSTS, seed=seed, on_sms=on_sms) for seed in SEEDS] for _ in range(2))
        assert once == again
        assert all(waited_for_links(timeline) > 0.3 for timeline in once)
        assert len({timeline.makespan for timeline in once}) > 1


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

    def test_the_summary_names_the_figures(self):
        text = str(simulate(plan_calls(produce_reduce_scatter, WORLD, 1), COSTS))
        for words in ("makespan", "exposed communication", "overlap efficiency", "compute0 busy", "copy busy"):
            assert words in text


class TestSleepTrick:
    """Torch's matmul-reduce-scatter: two streams take turns, with barriers on each."""

    def timelines(self, order):
        calls = plan_calls(torch_matmul_reduce_scatter, WORLD, 1, order=order)
        return [simulate(calls, COSTS, seed=seed) for seed in SEEDS]

    def test_streams_that_start_in_a_different_order_make_every_rank_wait_for_the_slowest(self):
        differ = [each for each in self.timelines(None) if len(set(first_streams(each))) == 2]
        assert len(differ) > len(SEEDS) / 2
        best = self.timelines("sleep")[0]
        for timeline in differ:
            assert all(waited_at_barriers(timeline, rank) > 0.5 for rank in range(WORLD))
            assert timeline.makespan > best.makespan + 0.5

    def test_streams_that_wait_for_each_other_keep_the_order_but_do_not_overlap_matmuls(self):
        for timeline in self.timelines("wait"):
            assert set(first_streams(timeline)) == {"compute1"}
            assert all(waited_at_barriers(timeline, rank) < 0.01 for rank in range(WORLD))
            assert timeline.makespan >= WORLD * 1.25, "every matmul's tail is paid for"

    def test_the_sleep_keeps_the_order_and_overlaps_matmuls(self):
        for timeline in self.timelines("sleep"):
            assert set(first_streams(timeline)) == {"compute1"}
            assert all(waited_at_barriers(timeline, rank) < 0.01 for rank in range(WORLD))
            assert timeline.makespan < WORLD * 1.0 + 0.25 + 0.15, "one tail, the reduction, little else"

    def test_at_two_ranks_the_sleep_is_ahead_of_the_own_chunk(self):
        for seed in SEEDS:
            timeline = simulate(plan_calls(torch_matmul_reduce_scatter, 2, 1), COSTS, seed=seed)
            assert first_streams(timeline) == ["compute1"] * 2

    @pytest.mark.parametrize("planner", [produce_reduce_scatter, produce_all_reduce])
    @pytest.mark.parametrize("world", [2, 3, 4, 8])
    def test_our_plans_start_in_the_same_order_on_every_rank(self, planner, world):
        for seed in SEEDS:
            timeline = simulate(plan_calls(planner, world, 1, compute=TWO), COSTS, seed=seed)
            assert set(first_streams(timeline)) == {"compute1"}
        without = [
            simulate(plan_calls(planner, world, 1, compute=TWO, sleep=False), COSTS, seed=seed) for seed in SEEDS
        ]
        assert any(len(set(first_streams(timeline))) == 2 for timeline in without)
        assert max(each.makespan for each in without) > timeline.makespan

    def test_our_reduce_scatter_is_no_slower_than_torchs_and_two_streams_hide_tails(self):
        ours = simulate(plan_calls(produce_reduce_scatter, WORLD, 1, compute=TWO), COSTS)
        one_stream = simulate(plan_calls(produce_reduce_scatter, WORLD, 1), COSTS)
        assert ours.makespan <= self.timelines("sleep")[0].makespan
        assert one_stream.makespan > ours.makespan + 2 * 0.25


class TestAllGatherSchedules:
    """Publishing the shard (``mv``) and telling the peers (``b``), against the first matmul: all kernels, or not."""

    KERNELS = COMPUTES | {"publish", "barrier", "signal"}

    def exposed(self, planner, on_sms=KERNELS, **arguments):
        calls = plan_calls(planner, WORLD, 1, **arguments)
        return max(simulate(calls, COSTS, seed=seed, on_sms=on_sms).exposed for seed in SEEDS)

    def test_mv_or_b_after_the_first_matmul_delays_every_rank(self):
        beside = plan_calls(torch_all_gather_matmul, WORLD, 1, mv_first=False)
        mv_late, b_late = 0, 0
        for seed in range(64):
            timeline = simulate(beside, COSTS, seed=seed, on_sms=self.KERNELS)
            starts = {(event.at.rank, event.at.index): event.start for event in timeline.events}
            kinds = [step.kind for step in beside[0][0].steps]
            mv, own, pull = kinds.index("publish"), kinds.index("consume"), kinds.index("pull")
            late = [starts[rank, mv] > starts[rank, own] for rank in range(WORLD)]
            mv_late += any(late)
            b_late += not any(late)
            # Where mv came first, the matmul was next in line, ahead of b.
            assert all(starts[rank, pull] > 1.0 for rank in range(WORLD)), (
                "a whole matmul passes before anyone can pull"
            )
        assert mv_late
        assert b_late

    def test_torch_exposes_mv_and_b_rather_than_risk_it(self):
        first, beside = (self.exposed(torch_all_gather_matmul, mv_first=mv_first) for mv_first in (True, False))
        assert 0.3 < first < beside

    def test_ours_exposes_no_more_than_torch_where_signals_are_kernels(self):
        ours = self.exposed(all_gather_consume, compute=TWO, outbound="compute0")
        assert 0.3 < ours <= self.exposed(torch_all_gather_matmul)
        assert self.exposed(all_gather_consume, compute=TWO) > ours, (
            "signals behind the matmul: why outbound is a choice"
        )

    def test_ours_hides_everything_where_no_kernel_is_needed_to_publish_and_signal(self):
        assert self.exposed(all_gather_consume, on_sms=COMPUTES, compute=TWO) < 0.01
        assert self.exposed(torch_all_gather_matmul, on_sms=COMPUTES) > 0.3

    def test_the_sleep_lets_publishing_go_ahead_of_the_first_matmul(self):
        on_sms = COMPUTES | {"publish"}
        with_sleep, without_it = (self.exposed(all_gather_consume, on_sms, compute=TWO, sleep=s) for s in (True, False))
        assert with_sleep == pytest.approx(0.3, abs=0.01), "publishing itself is a kernel here"
        assert without_it > with_sleep + 0.25
        for seed in SEEDS:  # with more chunks the own ones are on both streams
            calls = plan_calls(all_gather_consume, WORLD, 1, compute=TWO, chunks=2)
            kernels = [
                event
                for event in simulate(calls, COSTS, seed=seed, on_sms=on_sms).events
                if event.at.step.kind in on_sms
            ]
            assert {event.at.step.kind for event in kernels[:WORLD]} == {"publish"}

    def test_a_symmetric_input_needs_no_publishing(self):
        assert self.exposed(all_gather_consume, compute=TWO, symmetric=True, outbound="compute0") < 0.05
