"""The unit-time simulator gives the same tables as torch's, and its compiled form the same tables as its plain form."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bench import pipeline_reference as reference
from symm_overlap.pipeline import Action, Schedule, to_torch
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.lowering import add_send_recv, defer_receives
from symm_overlap.pipeline.simulation.encoded import encode, with_messages
from symm_overlap.pipeline.simulation.unit_time import DeadlockError, UnitTime, simulate_unit_time

from . import unit_time_twin
from .random_schedules import random_compute, with_residency
from .random_tables import random_table
from .tables import TWO_RANKS, V_SPLIT, changed, lowered, swap, table

GOLDEN = """\
         Rank 0   Rank 1
Step 00: 0F0
Step 01: 0SEND_F0 1RECV_F0
Step 02: 0F1
Step 03: 0SEND_F1 1RECV_F1
Step 04:          1F0
Step 05:          1B0
Step 06: 0RECV_B0 1SEND_B0
Step 07: 0B0      1F1
Step 08:          1B1
Step 09: 0RECV_B1 1SEND_B1
Step 10: 0B1"""

Table = tuple[tuple[Action | None, ...], ...]
Simulate = Callable[[Schedule], UnitTime]


def texts(rows: object) -> list[list[str | None]]:
    return [[None if action is None else str(action) for action in row] for row in rows]  # type: ignore[attr-defined]


def outcome(schedule: Schedule, simulate: Simulate = simulate_unit_time) -> tuple[Table, dict[int, Action]]:
    """Return the table, and for each rank that is stuck, the action that it cannot run."""
    try:
        return simulate(schedule).table(), {}
    except DeadlockError as error:
        return error.partial.table(), error.next_actions


@pytest.mark.parametrize("simulate", [simulate_unit_time, unit_time_twin.simulate_unit_time])
def test_golden_tables(simulate: Simulate) -> None:
    result = simulate(lowered(*TWO_RANKS))
    assert str(result) == GOLDEN
    assert (result.length, result.idle()) == (11, (3, 3))


@pytest.mark.parametrize(
    ("name", "chunks", "microbatches", "ranks", "steps"),
    [
        ("Interleaved1F1B", 2, 8, 4, 149),
        ("Interleaved1F1B", 4, 32, 8, 2079),
        ("Interleaved1F1B", 4, 128, 64, 51_625),
        ("LoopedBFS", 4, 128, 64, 51_505),
        ("ZBVZeroBubble", 2, 128, 64, 2413),
        ("InterleavedZeroBubble", 4, 128, 64, 28_897),
    ],
)
def test_golden_numbers_of_steps(name: str, chunks: int, microbatches: int, ranks: int, steps: int) -> None:
    lowered = with_messages(encode(generate(name, ranks, microbatches, chunks)))
    assert simulate_unit_time(lowered).length == steps


def test_golden_number_of_steps_with_receives_deferred() -> None:
    deferred = defer_receives(add_send_recv(generate("Interleaved1F1B", 8, 32, 4)))
    assert simulate_unit_time(deferred).length == 790


def test_random_schedules_run_as_in_torch() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for seed in range(60):
        compute = random_compute(seed)

        def rank_of(stage: int, placement: tuple[int, ...] = compute.placement) -> int:
            return placement[stage]

        stages = compute.stages
        torchs = schedules._add_send_recv(to_torch(compute), rank_of, stages)
        ours = with_messages(encode(compute)).schedule()
        assert texts(ours.rows) == texts(torchs.values()), seed
        expected = schedules._simulate_comms_compute(torchs, rank_of, stages)
        assert texts(simulate_unit_time(ours).table()) == texts(expected.values()), seed


def test_random_schedules_run_as_in_a_search_through_all_earlier_actions() -> None:
    for seed in range(60):
        compute = random_compute(seed)
        ours = with_messages(encode(compute)).schedule()
        assert texts(ours.rows) == texts(reference.add_send_recv(compute)), seed
        assert texts(simulate_unit_time(ours).table()) == texts(reference.simulate(ours)), seed


def test_the_twin_gives_the_same_bits() -> None:
    halted = 0
    for seed in range(100):
        right = with_messages(encode(with_residency(random_compute(seed, compounds=True), seed))).schedule()
        source = random.Random(seed)

        def mix(rows: list[list[Action | None]], source: random.Random = source) -> None:
            for row in rows:
                first, second = (source.randrange(len(row)) for _ in range(2))
                row[first], row[second] = row[second], row[first]

        for schedule in (right, changed(right, mix), random_table(seed)):
            plain = outcome(schedule, unit_time_twin.simulate_unit_time)
            assert outcome(schedule) == plain, seed
            halted += bool(plain[1])
        assert not outcome(right)[1], seed
    assert halted > 50


def test_sends_and_receives_are_put_as_by_the_pass_in_python() -> None:
    for seed in range(100):
        for schedule in (random_compute(seed, compounds=True), random_table(seed)):
            encoded = encode(schedule)
            try:
                plain = add_send_recv(schedule)
            except ValueError:
                assert with_messages(encoded) is encoded, seed
            else:
                assert with_messages(encoded).schedule() == plain, seed


def test_torchs_simulator_refuses_what_ours_runs() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for text in ("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD", "0F0,(0F1;0B0)OVERLAP_F_B,0B1"):
        schedule = table(text)
        assert simulate_unit_time(schedule).length == len(schedule.rows[0])
        with pytest.raises(ValueError, match="Unsupported action type"):
            schedules._simulate_comms_compute(to_torch(schedule), lambda stage: 0, 1)


def test_a_compound_needs_what_its_parts_need() -> None:
    rows = ("0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0")
    assert simulate_unit_time(table(*rows)).length == 6
    late = ("0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0", "1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0")
    result = simulate_unit_time(table(*late))
    assert [str(action) for action in result.table()[1] if action][-2:] == ["(1F1;1B0)OVERLAP_F_B", "1SEND_B0"]
    assert result.length == 8
    with pytest.raises(DeadlockError, match=r"rank 1 cannot run \(1F1;1B0\)OVERLAP_F_B"):
        simulate_unit_time(table(late[0], late[1].replace("1RECV_F1,", "")))


def test_a_deadlock_shows_the_table_and_where_each_rank_is() -> None:
    stuck = changed(lowered(*TWO_RANKS), swap(0, "0SEND_F1", "0RECV_B0"))
    with pytest.raises(DeadlockError) as caught:
        simulate_unit_time(stuck)
    assert str(caught.value).splitlines() == [
        "the schedule deadlocks:",
        "    rank 0 cannot run 0RECV_B0",
        "    rank 1 cannot run 1RECV_F1",
        "It ran up to here:",
        "         Rank 0   Rank 1",
        "Step 00: 0F0",
        "Step 01: 0SEND_F0 1RECV_F0",
        "Step 02: 0F1",
    ]
    assert caught.value.next_actions == {0: Action(0, "RECV_B", 0), 1: Action(1, "RECV_F", 1)}


def test_a_schedule_without_messages_is_told_what_adds_them() -> None:
    with pytest.raises(
        DeadlockError, match=r"^the schedule deadlocks, because it has no sends and receives \(symm_over"
    ):
        simulate_unit_time(generate("GPipe", ranks=2, microbatches=2))


def test_a_stage_that_nobody_sends_to_waits_for_ever() -> None:
    for row in ("0RECV_F0", "0RECV_B0", "0SEND_F0", "0SEND_B0", "0WAIT_SEND_F0"):
        assert outcome(table(row))[1] == {0: Action.parse(row)}


def test_neighbours_on_one_rank_hand_over_without_a_send() -> None:
    sends = {str(action) for row in lowered(*V_SPLIT).rows for action in row if "SEND" in str(action)}
    assert sends == {
        f"{stage}SEND_{way}{microbatch}"
        for stage, way in ((0, "F"), (2, "F"), (1, "B"), (3, "B"))
        for microbatch in (0, 1)
    }
    two = table("0F0,0B0,3F1,3B1", "1F0,1B0,2F1,2B1", pipelines=2, placement=(0, 1, 1, 0))
    ours = with_messages(encode(two)).schedule()
    assert "1SEND_F0" not in {str(action) for row in ours.rows for action in row}
    assert simulate_unit_time(ours).length == 11
