"""A schedule finds its placement and sizes in its table of actions, and rejects a table that is not a schedule."""

import pytest

from symm_overlap.pipeline import Action, Schedule
from symm_overlap.pipeline.placement import loop, v


def table(*lines):
    """Return rows of actions from lines of text. "." is an empty cell."""
    return [[None if cell == "." else Action.parse(cell) for cell in line.split()] for line in lines]


def test_placement_and_microbatches_are_found_in_the_actions():
    schedule = Schedule.from_rows(table("0F0 0F1 . 3B0", ". 1F0 2F2"))
    assert (schedule.ranks, schedule.stages, schedule.microbatches, schedule.size) == (2, 4, 3, 5)
    assert schedule.placement == (0, 1, 1, 0)
    assert schedule.stages_of_ranks == ((0, 3), (1, 2))
    assert [schedule.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]


def test_neighbours_of_a_stage():
    schedule = Schedule.from_rows(table("0F0 3F0", "1F0 2F0"))
    assert [schedule.previous_stage(stage) for stage in range(4)] == [None, 0, 1, 2]
    assert [schedule.next_stage(stage) for stage in range(4)] == [1, 2, 3, None]


def test_two_pipelines_do_not_touch():
    schedule = Schedule.from_rows(table("0F0 3F1", "1F0 2F1"), pipelines=2)
    assert [schedule.previous_stage(stage) for stage in range(4)] == [None, 0, None, 2]
    assert [schedule.next_stage(stage) for stage in range(4)] == [1, None, 3, None]
    assert [list(schedule.microbatches_of(stage)) for stage in range(4)] == [[0], [0], [1], [1]]


def test_a_schedule_is_a_value():
    first, second = (Schedule.from_rows(table("0F0", "1F0")) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first.with_rows([[], []]).placement == first.placement


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (table("0F0", "0F1"), {}, r"row 2 \(rank 1\), cell 1: 0F1 is of stage 0, which row 1 has too"),
        (table("0F0 . (0F1;1B0)OVERLAP_F_B", "1F0"), {}, r"row 2 \(rank 1\), cell 1: 1F0 is of stage 1, which row 1 "),
        (table("0F0", ". ."), {}, r"row 2 \(rank 1\) has no actions"),
        (table("0F0", "2F0"), {}, "stage 1 has no actions, but stage 2 has"),
        (table("0F0", "1F0"), {"placement": (1, 0)}, r"row 1 \(rank 0\), cell 1: expected an action of a stage that"),
        (table("0F0", "1F0"), {"placement": (0,)}, r"row 2 .*which are \[\], and found 1F0"),
        (table("0F0", "1F0"), {"placement": (0, 2)}, "stage 1 is placed on rank 2, but there are 2 rows"),
        (table("0F0 0F3", "1F0"), {"microbatches": 3}, r"row 1 \(rank 0\), cell 2: expected a microbatch from 0 to 2"),
        (table("0F0 0F1", "1F1"), {"pipelines": 2}, r"cell 2: expected a microbatch from 0 to 0, which stage 0 runs"),
        (table("0F0", "1F0"), {"pipelines": 2}, "2 stages and 1 microbatches cannot be shared equally by 2 pipelines"),
        (table("0F0"), {"pipelines": 0}, "by 0 pipelines"),
        ([], {}, "the table has no actions: a schedule has at least one rank"),
    ],
)
def test_a_table_that_is_no_schedule_is_refused(rows, arguments, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_rows(rows, **arguments)


def test_loop_and_v_placement():
    assert loop(3, 7) == (0, 1, 2, 0, 1, 2, 0)
    assert v(4, 8) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert v(2, 8) == (0, 1, 1, 0, 0, 1, 1, 0)


def test_placements_equal_torch():
    utils = pytest.importorskip("torch.distributed.pipelining._utils")
    for ranks in range(1, 7):
        for stages_per_rank in range(1, 5):
            for style, placement in (("loop", loop), ("v", v)):
                expected = utils.generate_stage_to_rank_mapping(ranks, ranks * stages_per_rank, style)
                assert dict(enumerate(placement(ranks, ranks * stages_per_rank))) == expected
