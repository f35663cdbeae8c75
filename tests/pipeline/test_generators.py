"""Generated schedules have every action once, can run, and have the memory and idle time that their papers state."""

from collections import Counter
from fractions import Fraction

import pytest

from symm_overlap.pipeline.generators import GENERATORS, generate
from symm_overlap.pipeline.placement import loop, v

from .executor import peaks, results, run

MANY_STAGES = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
IN_A_V = ("ZBVZeroBubble", "V-Half", "V-Min", "DualPipeV")


def sizes(name, ranks, microbatches, stages):
    """Yield (schedule, ranks, microbatches) for all arguments of a grid that the generator accepts."""
    for count in ranks:
        for per_rank in stages if name in MANY_STAGES else [None]:
            for microbatch_count in microbatches:
                try:
                    schedule = generate(name, count, microbatch_count, per_rank)
                except ValueError:
                    continue
                yield schedule, count, microbatch_count


@pytest.mark.parametrize("name", GENERATORS)
def test_every_microbatch_has_every_action_once_and_the_order_can_run(name):
    found = 0
    for schedule, ranks, microbatches in sizes(name, range(1, 7), range(1, 18), (1, 2, 3)):
        found += 1
        run(schedule)
        actions = [leaf for row in schedule.rows for action in row if action for leaf in action.leaves]
        done = Counter(result for action in actions for result in results(action))
        assert set(done.values()) == {1}
        wanted = {(s, kind, m) for s in range(schedule.stages) for kind in "FIW" for m in schedule.microbatches_of(s)}
        assert set(done) == wanted
        assert (schedule.ranks, schedule.microbatches) == (ranks, microbatches)
        if name != "DualPipe":
            assert schedule.placement == (v if name in IN_A_V else loop)(ranks, schedule.stages)
    assert found > 10


@pytest.mark.parametrize("name", GENERATORS)
def test_actions_stand_in_the_row_of_their_stage(name):
    for schedule, _, _ in sizes(name, (2, 4), (8, 9), (2,)):
        for rank, row in enumerate(schedule.rows):
            assert all(schedule.rank_of(leaf.stage) == rank for action in row if action for leaf in action.leaves)


COSTS = [(1, 1, 1), (2, 2, 1), (3, 4, 2), (Fraction(7, 3), 3, 2)]
"""Durations of F, I and W of one stage for which the closed forms hold, because none is shorter than W."""


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_idle_time_of_schedules_with_one_order_of_stages(ranks, costs):
    """The idle time is the closed form of the papers. There, B is the full backward: B = I + W."""
    F, I, W = costs  # noqa: E741
    B = I + W
    for microbatches in (2 * ranks, 3 * ranks, 4 * ranks + 1):
        work = microbatches * (F + B)
        for name in ("GPipe", "1F1B"):
            assert run(generate(name, ranks, microbatches), *costs).span - work == (ranks - 1) * (F + B)
        assert run(generate("ZB-H1", ranks, microbatches), *costs).span - work == (ranks - 1) * (F + B - 2 * W)


@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_idle_time_of_interleaved_1f1b_is_that_of_1f1b_by_the_stages_a_rank(ranks, stages_per_rank):
    F, I, W = 2, 3, 1  # noqa: E741
    schedule = generate("Interleaved1F1B", ranks, 4 * ranks, stages_per_rank)
    work = 4 * ranks * stages_per_rank * (F + I + W)
    assert run(schedule, F, I, W).span - work == (ranks - 1) * (F + I + W)  # F, I and W of one small stage


@pytest.mark.parametrize("ranks", range(1, 10))
def test_schedules_without_idle_time(ranks):
    for microbatches in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1):
        for name, of_a_stage in (("ZB-H2", 1), ("ZBVZeroBubble", 2)):
            found = run(generate(name, ranks, microbatches))
            assert found.span == 3 * of_a_stage * microbatches
            assert [found.bubble(rank) for rank in range(ranks)] == [0] * ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 2, 1), (3, 3, 2)])
def test_idle_time_of_dualpipe(ranks, costs):
    """The idle time is (p / 2 - 1) (F&B + B - 3 W), if p is the stages of one pipeline, F = I and F&B is F + B.

    If a pair takes less than F + B, the idle time is at most that.
    """
    F, I, W = costs  # noqa: E741
    B = I + W
    for name, stages in (("DualPipe", ranks), ("DualPipeV", 2 * ranks)):
        for microbatches in (2 * stages, 3 * stages):
            schedule = generate(name, ranks, microbatches)
            for together in (F + B, F + B - W):
                found = run(schedule, *costs, together)
                idle, formula = max(map(found.bubble, range(ranks))), (stages // 2 - 1) * (together + B - 3 * W)
                assert idle == formula if together == F + B else idle <= formula


def test_activations_that_are_kept():
    """A rank's stages keep these numbers of activations. In V schedules, the activations are half as large."""
    for ranks in (1, 2, 3, 4, 7, 8):
        many = 4 * ranks
        assert peaks(generate("GPipe", ranks, many)) == [many] * ranks
        assert peaks(generate("1F1B", ranks, many)) == list(range(ranks, 0, -1))
        assert peaks(generate("LoopedBFS", ranks, many, 3)) == [3 * many] * ranks
        assert peaks(generate("ZB-H1", ranks, many)) == [ranks] * ranks
        assert peaks(generate("ZB-H2", ranks, many)) == [2 * ranks - 1] * ranks
        assert peaks(generate("ZBVZeroBubble", ranks, many)) == [2 * ranks] * ranks
        assert peaks(generate("DualPipeV", ranks, many)) == [2 * ranks + 1] * ranks
        if ranks % 2 == 0:
            assert peaks(generate("DualPipe", ranks, many)) == [ranks + 1] * ranks


@pytest.mark.parametrize("ranks", range(1, 21))
def test_v_half_and_v_min_keep_what_their_paper_says(ranks):
    """They keep (p + 2) // 2 and (p + 4) // 3 microbatches, and are idle for about p / 2m and 2p / 3m of the work.

    A stage keeps one half of a microbatch.
    """
    many = 4 * ranks
    half, least = generate("V-Half", ranks, many), generate("V-Min", ranks, many)
    assert max(peaks(half)) <= 2 * ((ranks + 2) // 2)
    assert max(peaks(least)) <= 2 * ((ranks + 4) // 3)
    work = 6 * many
    assert run(half).span - work <= 3.25 * ranks
    assert run(least).span - work <= 4 * ranks


def test_fewer_microbatches_than_stages():
    for name in ("GPipe", "1F1B", "ZB-H1", "ZB-H2", "ZBVZeroBubble", "V-Half", "V-Min", "Interleaved1F1B"):
        for microbatches in (1, 2, 3):
            run(generate(name, 6, microbatches))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1F1B", 0, 4), "1F1B: ranks must be at least 1, not 0; the nearest that works is 1"),
        (("GPipe", 4, 0), "GPipe: microbatches must be at least 1, not 0"),
        (("Interleaved1F1B", 4, 9), "equal rounds of 4.*; 9 does not work; the nearest that work are 8 and 10"),
        (("InterleavedZeroBubble", 4, 13), "13 does not work; the nearest that work are 12 and 15"),
        (("LoopedBFS", 2, 4, 0), "LoopedBFS: stages_per_rank must be at least 1"),
        (("ZBV", 2, 4, 3), "ZBVZeroBubble: every rank has two stages.*the nearest that works is stages_per_rank=2"),
        (("V-Half", 2, 4, 1), "V-Half: every rank has two stages"),
        (("DualPipeV", 4, 7), "stages, which are 8; 7 does not work; the nearest that works is 8"),
        (("DualPipe", 4, 9), "at least 4 microbatches each; 9 does not work; the nearest that work are 8 and 10"),
        (("DualPipe", 3, 12), "DualPipe: ranks make pairs.* 3 is odd; the nearest that work are 2, 4"),
        (("1F1B", 4, 8, 2), "1F1B: a rank has 1 of the stages, not 2; the nearest that works is stages_per_rank=1"),
        (("2F2B", 4, 8), "there is no schedule '2F2B': it is one of GPipe, 1F1B"),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_the_nearest_that_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(*arguments)


def test_sizes_are_integers():
    for size in (2.0, "4", True, None):
        with pytest.raises(TypeError, match="ranks must be an integer"):
            generate("1F1B", size, 4)


def test_a_name_is_a_text():
    with pytest.raises(ValueError, match="there is no schedule None: it is one of GPipe"):
        generate(None, 2, 4)


def test_names_are_found_however_they_are_written():
    assert generate("zb_h1", 2, 4) == generate("ZB-H1", 2, 4) == GENERATORS["ZB-H1"](2, 4)
    assert generate("zbv", 2, 4) == generate("ZBVZeroBubble", 2, 4, 2)
    assert generate("ZB1P", 2, 4) == generate("InterleavedZeroBubble", 2, 4, 2)
