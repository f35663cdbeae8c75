"""The verifier finds every planted fault, names its kind and its place, and accepts every right schedule."""

from __future__ import annotations

import random

import pytest

from symm_overlap.pipeline import Action, Schedule, write_csv
from symm_overlap.pipeline.generators import GENERATORS, generate
from symm_overlap.pipeline.lowering import add_send_recv, defer_receives, lower
from symm_overlap.pipeline.simulation.unit_time import DeadlockError, simulate_unit_time
from symm_overlap.pipeline.verify import TRANSPORTS, Place, verify

from .links import finishes
from .random_schedules import random_compute, with_residency
from .tables import TWO_RANKS, V_SPLIT, changed, drop, insert, lowered, swap, table

SHARDED = (
    "0UNSHARD,0F0,0SEND_F0,0RESHARD,0RECV_B0,0UNSHARD,0B0,0RESHARD,0REDUCE_GRAD",
    "1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1RESHARD,1REDUCE_GRAD,1WAIT_REDUCE_GRAD",
)
OVERLAPPED = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2",
    "1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1RECV_F2,1SEND_B0,(1F2;1B1)OVERLAP_F_B,1SEND_B1,1B2,1SEND_B2",
)
PROBLEMS = {
    "misplaced", "missing", "duplicated", "order", "unpaired",
    "crossed", "deadlock", "sharded", "resharded", "unreduced",
}  # fmt: skip
FORWARD_ONLY = ("0F0,0F1", "1F0,1F1")
TWO_PIPELINES = ("0F0,0B0,3F1,3B1", "1F0,1B0,2F1,2B1")  # stages 0 and 1 run microbatch 0, stages 2 and 3 microbatch 1


def kinds(schedule: Schedule, **arguments: str) -> set[str]:
    return {problem.kind for problem in verify(schedule, **arguments).problems}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "schedule",
    [
        table(*TWO_RANKS),
        lowered(*TWO_RANKS),
        table(*V_SPLIT),
        lowered(*V_SPLIT),
        table(*SHARDED),
        table(*OVERLAPPED),
        table(*FORWARD_ONLY),
        lowered(*FORWARD_ONLY),
        lowered(*TWO_PIPELINES, pipelines=2, placement=(0, 1, 1, 0)),
        table("0F0,0B0"),
    ],
    ids=lambda schedule: write_csv(schedule).split()[0],
)
def test_what_is_right_is_accepted(schedule: Schedule, transport: str) -> None:
    report = verify(schedule, transport=transport)
    assert report.ok, str(report)
    report.raise_for_problems()
    assert "each once and in order, no deadlock" in str(report)


@pytest.mark.parametrize("name", GENERATORS)
def test_what_generators_and_passes_make_is_accepted(name: str) -> None:
    found = 0
    for ranks in (1, 2, 3, 4):
        for microbatches in (1, 3, 4, 8, 9):
            for chunks in (None, 1, 3):
                try:
                    schedule = generate(name, ranks, microbatches, chunks)
                except ValueError:
                    continue
                found += 1
                verify(schedule).raise_for_problems()
                verify(lower(schedule, waits=True)).raise_for_problems()
                # A deferred receive is safe if sends do not wait for it; see lowering.defer.
                verify(lower(schedule, deferred=True), transport="buffered").raise_for_problems()
    assert found


def test_random_schedules_are_accepted() -> None:
    for seed in range(40):
        schedule = with_residency(random_compute(seed, compounds=True), seed)
        for each in (schedule, add_send_recv(schedule)):
            for transport in TRANSPORTS:
                report = verify(each, transport=transport)
                assert report.ok, (seed, str(report))


def test_what_cannot_run_is_never_accepted() -> None:
    """Swap cells at random. If the simulator cannot run a schedule, the verifier must reject it."""
    stuck = 0
    for seed in range(150):
        source = random.Random(seed)

        def mix(rows: list[list[Action | None]], source: random.Random = source) -> None:
            row = source.choice([row for row in rows if row])
            first, second = (source.randrange(len(row)) for _ in range(2))
            row[first], row[second] = row[second], row[first]

        mixed = changed(add_send_recv(random_compute(seed)), mix)
        try:
            simulate_unit_time(mixed)
        except DeadlockError:
            stuck += 1
            assert not verify(mixed, transport="buffered").ok, seed
    assert stuck > 20


@pytest.mark.parametrize("transport", ["queued", "rendezvous"])
def test_a_machine_that_passes_messages_stops_where_a_deadlock_is_found(transport: str) -> None:
    found = {True: 0, False: 0}
    schedules = [generate(name, 4, 8) for name in GENERATORS] + [random_compute(seed) for seed in range(60)]
    for number, schedule in enumerate(schedules):
        if schedule.pipelines > 1:  # that machine supports only one
            continue
        sent = add_send_recv(schedule)
        for each in (sent, *(defer_receives(sent, kind) for kind in ("buffered", "queued", "rendezvous"))):
            runs = finishes(each, transport)
            assert verify(each, transport=transport).ok == runs, number
            found[runs] += 1
    assert min(found.values()) > 10


def test_a_queue_whose_ends_differ_is_told() -> None:
    # Rank 0 sends 0F1 before it receives 1B0. Rank 1 sends 1B0 before it receives 0F1.
    rows = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
    )
    report = verify(table(*rows), transport="queued")
    assert [problem.kind for problem in report.problems] == ["deadlock"]
    assert "it waits for a message after" in str(report)
    assert "whose other end expects another one" in str(report)
    assert verify(table(*rows), transport="buffered").ok


def test_a_ring_of_queues_is_told_rank_by_rank() -> None:
    rows = ("3RECV_F0,3F0,0F0,0SEND_F0", "1RECV_F0,1F0,1SEND_F0", "2RECV_F0,2F0,2SEND_F0")
    ring = verify(table(*rows, placement=(0, 1, 2, 0)), transport="queued")
    assert [problem.text for problem in ring.problems if problem.kind == "deadlock"] == [
        "rank 0 is at 3F0 and waits for 2SEND_F0 of rank 2, which comes after 2F0; "
        "rank 2 is at 2F0 and waits for 1SEND_F0 of rank 1, which comes after 1F0; "
        "rank 1 is at 1F0 and waits for 0SEND_F0 of rank 0, which comes after 3F0"
    ]


# For each fault: a right schedule, the change that makes it wrong, and what the report must say.
FAULTS = {
    "a forward is dropped": (table(*TWO_RANKS), drop(1, "1F1"), "no 1F1"),
    "a backward is dropped": (lowered(*TWO_RANKS), drop(0, "0B1"), "neither 0B1 nor 0I1 and 0W1"),
    "a weight gradient is dropped": (lowered(*V_SPLIT), drop(0, "3W1"), "no 3W1"),
    "an input gradient is dropped": (table(*V_SPLIT), drop(0, "0I1"), "no 0I1"),
    "a forward is there twice": (lowered(*TWO_RANKS), insert(1, "1B1", "1F1"), "1F1 is there 2 times"),
    "a backward is there whole and in halves": (
        lowered(*TWO_RANKS), insert(0, "0B1", "0W1"), "0B1 computes both gradients",
    ),
    "a send is there twice": (lowered(*TWO_RANKS), insert(0, "0F1", "0SEND_F0"), "0SEND_F0 is there 2 times"),
    "a backward comes before its forward": (table(*TWO_RANKS), swap(1, "1F0", "1B0"), "row 2 (rank 1), cell 2: 1B0"),
    "a weight gradient comes before the input's": (
        lowered(*V_SPLIT), swap(1, "2I0", "2W0"), "the first one needs the second one in an earlier cell",
    ),
    "a forward comes before its receive": (
        lowered(*TWO_RANKS), swap(1, "1F0", "1RECV_F0"), "the first one needs the second one in an earlier cell",
    ),
    "a V hands over before it has computed": (
        lowered(*V_SPLIT), swap(1, "1F0", "2F0"), "the first one needs the second one in an earlier cell",
    ),
    "a send comes before what it sends": (
        lowered(*TWO_RANKS), swap(0, "0F0", "0SEND_F0"), "the first one needs the second one in an earlier cell",
    ),
    "a receive comes after its use": (lowered(*TWO_RANKS), swap(0, "0RECV_B1", "0B1"), "no later action uses"),
    "a receive is missing": (lowered(*TWO_RANKS), drop(1, "1RECV_F1"), "it needs 1RECV_F1 before it"),
    "a send is missing": (lowered(*TWO_RANKS), drop(0, "0SEND_F1"), "rank 0 never sends it: no 0SEND_F1"),
    "both are missing": (
        lowered(*TWO_RANKS),
        lambda rows: (drop(0, "0SEND_F1")(rows), drop(1, "1RECV_F1")(rows)),
        "it needs 1RECV_F1 before it",
    ),
    "sends of a link are crossed": (
        lowered(*TWO_RANKS), swap(1, "1RECV_F0", "1RECV_F1"), "which receives in another order",
    ),
    "a stage sends to its own rank": (lowered(*V_SPLIT), insert(1, "2F0", "1SEND_F0"), "stage 2 is on the same rank"),
    "the last stage sends on": (lowered(*TWO_RANKS), insert(1, "1B1", "1SEND_F0"), "the last stage sends no output"),
    "two ranks receive first": (
        lowered(*TWO_RANKS), swap(0, "0SEND_F1", "0RECV_B0"),
        "rank 0 is at 0RECV_B0 and waits for 1SEND_B0 of rank 1, which comes after 1RECV_F1; "
        "rank 1 is at 1RECV_F1 and waits for 0SEND_F1 of rank 0, which comes after 0RECV_B0",
    ),
    "compute waits in a ring": (
        table("1F0,0F0", "2F0,3F0", placement=(0, 0, 1, 1)), swap(1, "2F0", "3F0"), "order: the first one needs",
    ),
    "an action is on another rank": (
        lowered(*TWO_RANKS), lambda rows: rows[0].append(Action.parse("1W0")), "stage 1 is on rank 1",
    ),
    "a microbatch is too many": (
        lowered(*TWO_RANKS), lambda rows: rows[0].append(Action.parse("0F2")), "stage 0 runs microbatches 0 to 1",
    ),
    "a stage is too many": (
        lowered(*TWO_RANKS), lambda rows: rows[0].append(Action.parse("2F0")), "there are stages 0 to 1",
    ),
    "compute comes after reshard": (
        table(*SHARDED), drop(0, "0UNSHARD"), "stage 0 computes before it is unsharded",
    ),
    "a stage is not unsharded again": (
        table(*SHARDED), lambda rows: rows[0].pop(5), "stage 0 computes after it was resharded",
    ),
    "a stage is unsharded twice": (table(*SHARDED), insert(1, "1F0", "1UNSHARD"), "stage 1 is unsharded already"),
    "a stage is unsharded for nothing": (
        table(*SHARDED), lambda rows: rows[1].append(Action.parse("1UNSHARD")), "stage 1 is unsharded for nothing",
    ),
    "a stage is resharded before its use": (
        table(*SHARDED), insert(0, "0F0", "0RESHARD"), "stage 0 is unsharded for nothing",
    ),
    "a stage is resharded twice": (table(*SHARDED), insert(1, "1REDUCE_GRAD", "1RESHARD"), "stage 1 is not unsharded"),
    "a reshard has nothing to free": (lowered(*TWO_RANKS), insert(0, "0F1", "0RESHARD"), "no stage is ever unsharded"),
    "gradients are reduced too early": (table(*SHARDED), swap(1, "1B0", "1REDUCE_GRAD"), "before its last backward"),
    "gradients are not reduced": (table(*SHARDED), drop(0, "0REDUCE_GRAD"), "no 0REDUCE_GRAD after the last backward"),
    "a wait has nothing to wait for": (
        lowered(*TWO_RANKS), insert(0, "0F0", "0WAIT_SEND_F0"), "the first one needs the second one",
    ),
    "a compound's part needs the other": (
        table(*OVERLAPPED),
        lambda rows: (drop(1, "1F0")(rows), swap_part(rows)),
        "the first one needs the second one in an earlier cell",
    ),
}  # fmt: skip


def swap_part(rows: list[list[Action | None]]) -> None:
    """Let the first compound of rank 1 run the forward and the backward of the same microbatch."""
    cell = rows[1].index(Action.parse("(1F1;1B0)OVERLAP_F_B"))
    rows[1][cell] = Action.parse("(1F0;1B0)OVERLAP_F_B")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    right, change, text = FAULTS[fault]
    report = verify(changed(right, change))
    assert not report.ok
    assert any(text in str(problem) for problem in report.problems), str(report)
    assert {problem.kind for problem in report.problems} <= PROBLEMS
    assert all(isinstance(place, Place) for problem in report.problems for place in problem.places)
    with pytest.raises(ValueError, match=r"problem"):
        report.raise_for_problems()


def test_every_dropped_or_doubled_action_is_found() -> None:
    for right in (lowered(*TWO_RANKS), lowered(*V_SPLIT), table(*SHARDED), table(*OVERLAPPED)):
        for rank, row in enumerate(right.rows):
            for cell, action in enumerate(row):
                assert action is not None
                if action.kind not in (
                    "RESHARD",
                    "WAIT_REDUCE_GRAD",
                ):  # stages may stay unsharded, and waits are optional
                    assert not verify(changed(right, lambda rows, r=rank, c=cell: rows[r].pop(c))).ok, str(action)
                doubled = changed(right, lambda rows, r=rank, c=cell: rows[r].insert(c, rows[r][c]))
                assert not verify(doubled).ok, str(action)


def test_sends_that_meet_hold_where_they_do_not_block_or_start_with_the_receives() -> None:
    # Rank 0 has stages 0 and 2, rank 1 has stages 1 and 3. Rank 0 sends 0F1 while rank 1 sends 1F0.
    sends = table(
        "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1",
        "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3F1",
    )
    assert kinds(sends, transport="rendezvous") == {"deadlock"}
    assert kinds(sends, transport="buffered") == set()
    assert kinds(sends, transport="batched") == set()


def test_receives_that_meet_hold_only_in_a_batch() -> None:
    rows = (
        "0F0,0SEND_F0,0F1,2RECV_F0,0SEND_F1,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1",
        "1RECV_F0,1F0,1RECV_F1,1SEND_F0,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3F1",
    )
    assert kinds(table(*rows), transport="batched") == set()
    assert kinds(table(*rows), transport="buffered") == {"deadlock"}
    assert kinds(table(*rows), transport="rendezvous") == {"deadlock"}


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="transport is 'letter': it must be one of 'rendezvous', 'batched'"):
        verify(table(*TWO_RANKS), transport="letter")


def test_peaks_are_counted() -> None:
    assert verify(table(*TWO_RANKS)).peak_activations == (2, 1)
    assert verify(table(*TWO_RANKS)).peak_unsharded == (1, 1)
    assert verify(table(*V_SPLIT)).peak_activations == (3, 4)  # rank 0: 0F0 0F1 3F0
    assert verify(table(*V_SPLIT)).peak_unsharded == (2, 2)
    assert verify(table(*SHARDED)).peak_unsharded == (1, 1)
    both = "0UNSHARD,1UNSHARD,0F0,1F0,1B0,1RESHARD,0B0"
    assert verify(table(both)).peak_unsharded == (2,)


def test_an_action_of_an_unknown_kind_is_found() -> None:
    (problem,) = verify(Schedule.from_rows([[Action(0, "F", 0), Action(0, "G", 0)]])).problems
    assert (problem.kind, problem.text) == ("misplaced", "there is no such kind of action")
