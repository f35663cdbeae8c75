"""Schedules convert to and from torch's tables without loss, and torch reads and writes the same text."""

import pytest
from torch.distributed.pipelining import schedules

from symm_overlap.pipeline import Action, Schedule, from_torch, read_csv, to_torch, write_csv
from symm_overlap.pipeline._torch import TorchAction, TorchKind
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.lowering import lower

from .random_tables import random_table
from .test_schedule import table
from .torch_tables import stage

KNOWN = {kind.value for kind in TorchKind}


def known_to_torch(schedule):
    """Return the schedule without the kinds of actions that the installed torch lacks."""
    return schedule.with_rows(
        [action for action in row if action is None or action.kind in KNOWN] for row in schedule.rows
    )


def test_a_table_comes_back_from_torch_as_it_was():
    for seed in range(200):
        schedule = known_to_torch(random_table(seed))
        assert from_torch(to_torch(schedule)).rows == schedule.rows


def test_torch_writes_and_reads_the_same_text():
    for seed in range(200):
        schedule = known_to_torch(random_table(seed))
        for ours, torchs in zip(schedule.rows, to_torch(schedule).values(), strict=True):
            assert [str(action) for action in ours] == [str(action) for action in torchs]
            assert [TorchAction.from_str(str(action)) for action in ours if action] == [one for one in torchs if one]


def test_torch_reads_only_the_beginning_of_a_text():
    assert str(TorchAction.from_str("3BW1")) == "3B", "this torch is as strict as Action.parse: say so there"
    with pytest.raises(ValueError, match="3BW1"):
        Action.parse("3BW1")


@pytest.mark.skipif("WAIT_SEND_F" in KNOWN, reason="this torch has the kinds that wait")
def test_a_kind_that_torch_lacks_is_refused():
    with pytest.raises(ValueError, match=r"row 1 \(rank 0\), cell 2: torch .* has no 0WAIT_SEND_F0"):
        to_torch(Schedule.from_rows(table("0F0 0WAIT_SEND_F0")))


def test_two_pipelines_are_refused():
    with pytest.raises(ValueError, match="this schedule has 2 pipelines: DualPipeV is the form"):
        to_torch(read_csv("0F0,3F1\n1F0,2F1\n", pipelines=2))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({0: ["0F0"], 2: ["1F0"]}, r"expected a table of ranks 0 to 1, and found ranks \[0, 2\]"),
        ({0: ["0F0", "0F"]}, r"row 1 \(rank 0\), cell 2: '0F' is not an action: F needs a microbatch"),
        ({0: ["0F0"], 1: ["0F1"]}, "which row 1 has too"),
    ],
)
def test_a_table_of_torch_that_is_no_schedule_is_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        from_torch({rank: [TorchAction.from_str(cell) for cell in row] for rank, row in rows.items()})


@pytest.mark.parametrize(("name", "lowered"), [("ZBV", False), ("ZBV", True), ("DualPipeV", True), ("1F1B", True)])
def test_torchs_runtime_loads_our_files(name, lowered, tmp_path):
    schedule = generate(name, 2, 5)
    written = lower(schedule, waits="WAIT_SEND_F" in KNOWN) if lowered else schedule
    (tmp_path / "schedule.csv").write_bytes(write_csv(written).encode())
    stages = [stage(2, schedule.stages, index) for index in schedule.stages_of_ranks[0]]
    runtime = schedules._PipelineScheduleRuntime(stages, schedule.microbatches)
    runtime.pipeline_order = {}
    runtime._load_csv(str(tmp_path / "schedule.csv"), "compute_comms" if lowered else "compute_only")
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    expected = written if lowered else lower(schedule, waits="WAIT_SEND_F" in KNOWN)
    assert from_torch(runtime.pipeline_order_with_comms) == expected
