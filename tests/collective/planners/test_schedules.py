"""Simulated timelines that explain the schedules of plans: the sleep trick, and the first steps of an all-gather."""

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_all_reduce, produce_reduce_scatter
from symm_overlap.collective.planners.published import torch_all_gather_matmul, torch_matmul_reduce_scatter
from symm_overlap.plan import plan_calls, simulate
from tests.plan.timelines import COMPUTES, COSTS, SEEDS, TWO, WORLD, first_streams, waited_at_barriers


class TestSleepTrick:
    """In torch's matmul-reduce-scatter, two streams take turns, with barriers on each."""

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
            assert timeline.makespan >= WORLD * 1.25, "the tail of every matmul must be exposed"

    def test_the_sleep_keeps_the_order_and_overlaps_matmuls(self):
        for timeline in self.timelines("sleep"):
            assert set(first_streams(timeline)) == {"compute1"}
            assert all(waited_at_barriers(timeline, rank) < 0.01 for rank in range(WORLD))
            assert timeline.makespan < WORLD * 1.0 + 0.25 + 0.15, "only one tail and the reduction are exposed"

    def test_at_two_ranks_the_sleep_is_ahead_of_the_own_chunk(self):
        """With two ranks, the stream of the local chunk sleeps first."""
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
    """Publishing the shard (``mv``) and notifying peers (``b``) compete with the first matmul if all are kernels."""

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
            # If mv came first, the matmul came next, before b.
            assert all(starts[rank, pull] > 1.0 for rank in range(WORLD)), (
                "no rank can pull before a whole matmul has run"
            )
        assert mv_late
        assert b_late

    def test_torch_exposes_mv_and_b_rather_than_risk_it(self):
        """Torch runs ``mv`` and ``b`` before the first matmul. Beside it, they may be exposed for longer."""
        first, beside = (self.exposed(torch_all_gather_matmul, mv_first=mv_first) for mv_first in (True, False))
        assert 0.3 < first < beside

    def test_ours_exposes_no_more_than_torch_where_signals_are_kernels(self):
        ours = self.exposed(all_gather_consume, compute=TWO, outbound="compute0")
        assert 0.3 < ours <= self.exposed(torch_all_gather_matmul)
        assert self.exposed(all_gather_consume, compute=TWO) > ours, (
            "signals after the matmul must cost time, the reason for the argument outbound"
        )

    def test_ours_hides_everything_where_no_kernel_is_needed_to_publish_and_signal(self):
        assert self.exposed(all_gather_consume, on_sms=COMPUTES, compute=TWO) < 0.01
        assert self.exposed(torch_all_gather_matmul, on_sms=COMPUTES) > 0.3

    def test_the_sleep_lets_publishing_go_ahead_of_the_first_matmul(self):
        on_sms = COMPUTES | {"publish"}
        with_sleep, without_it = (self.exposed(all_gather_consume, on_sms, compute=TWO, sleep=s) for s in (True, False))
        assert with_sleep == pytest.approx(0.3, abs=0.01), "publishing itself is a kernel here, and exposed"
        assert without_it > with_sleep + 0.25
        for seed in SEEDS:  # with several chunks, the local ones are on both streams
            calls = plan_calls(all_gather_consume, WORLD, 1, compute=TWO, chunks=2)
            kernels = [
                event
                for event in simulate(calls, COSTS, seed=seed, on_sms=on_sms).events
                if event.at.step.kind in on_sms
            ]
            assert {event.at.step.kind for event in kernels[:WORLD]} == {"publish"}

    def test_a_symmetric_input_needs_no_publishing(self):
        assert self.exposed(all_gather_consume, compute=TWO, symmetric=True, outbound="compute0") < 0.05
