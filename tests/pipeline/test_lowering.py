"""What the passes do where torch has no equivalent, and what they reject."""

import pytest

from symm_overlap.pipeline import Schedule, read_csv
from symm_overlap.pipeline.generators import GENERATORS, generate
from symm_overlap.pipeline.lowering import (
    add_reduce_grad,
    add_send_recv,
    add_send_waits,
    add_unshard_reshard,
    defer_receives,
    lower,
    merge_backward,
)
from symm_overlap.pipeline.lowering.defer import TRANSPORTS

from .links import finishes, in_order, messages
from .test_schedule import table


def lines(schedule):
    """Return the rows as lines of text."""
    return [" ".join("." if action is None else str(action) for action in row) for row in schedule.rows]


def schedule_of(*rows, **arguments):
    return Schedule.from_rows(table(*rows), **arguments)


def test_merge_takes_neighbours_of_one_stage_and_microbatch_only():
    schedule = schedule_of("0F0 . 0I0 . 0W0 1I0 0W1 1I1 1W0 1I2 1W2 (0F1;1B3)OVERLAP_F_B")
    assert lines(merge_backward(schedule)) == ["0F0 0B0 1I0 0W1 1I1 1W0 1B2 (0F1;1B3)OVERLAP_F_B"]


def test_a_window_slides_over_the_stages_of_a_rank():
    schedule = schedule_of("0F0 0F1 1F0 1F1 . 2F0 2B0 1B0 0B0")
    assert lines(add_unshard_reshard(schedule, 2)) == [
        "0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 1F0 1F1 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD"
    ]
    assert lines(add_unshard_reshard(schedule, 2, 1)) == [
        "0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 2UNSHARD 2F0 2B0 2RESHARD 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"
    ]


def test_a_compound_is_not_cut_by_a_window():
    schedule = schedule_of("0F0 (1F0;2B0)OVERLAP_F_B 3B0")
    assert lines(add_unshard_reshard(schedule, 2)) == [
        "0UNSHARD 1UNSHARD 2UNSHARD 0F0 0RESHARD (1F0;2B0)OVERLAP_F_B 1RESHARD 2RESHARD 3UNSHARD 3B0 3RESHARD"
    ]
    with pytest.raises(ValueError, match=r"\(1F0;2B0\)OVERLAP_F_B needs more stages than a window of 1 holds"):
        add_unshard_reshard(schedule, 1)


def test_look_ahead_may_differ_between_ranks():
    schedule = schedule_of("0F0 2F0", "1F0 3F0")
    assert lines(add_unshard_reshard(schedule, 2, (1, 2))) == [
        "0UNSHARD 0F0 0RESHARD 2UNSHARD 2F0 2RESHARD",
        "1UNSHARD 3UNSHARD 1F0 1RESHARD 3F0 3RESHARD",
    ]
    for window, ahead in ((0, None), (2, 3), (2, 0), (2, (1,)), (2, (1, 3))):
        with pytest.raises(ValueError, match="a look-ahead from 1 to the window, one or 2 of them"):
            add_unshard_reshard(schedule, window, ahead)
    with pytest.raises(ValueError, match="has 0UNSHARD already"):
        add_unshard_reshard(add_unshard_reshard(schedule))


def test_gradients_are_reduced_behind_the_last_backward_of_a_stage():
    schedule = schedule_of("0F0 0B0 0B1 1W0 . 1W1")
    assert lines(add_reduce_grad(schedule)) == ["0F0 0B0 0B1 0REDUCE_GRAD 1W0 1W1 1REDUCE_GRAD"]
    assert lines(add_reduce_grad(schedule, "at once")) == [
        "0F0 0B0 0B1 0REDUCE_GRAD 0WAIT_REDUCE_GRAD 1W0 1W1 1REDUCE_GRAD 1WAIT_REDUCE_GRAD"
    ]
    assert lines(add_reduce_grad(schedule, "late")) == [
        "0F0 0B0 0B1 0REDUCE_GRAD 1W0 1W1 0WAIT_REDUCE_GRAD 1REDUCE_GRAD 1WAIT_REDUCE_GRAD"
    ]
    with pytest.raises(ValueError, match="waits must be one of 'none', 'at once', 'late', not 'later'"):
        add_reduce_grad(schedule, "later")


def test_messages_are_placed_on_both_sides_at_once():
    schedule = read_csv("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n")
    assert lines(add_send_recv(schedule)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_neighbours_on_one_rank_need_no_messages():
    lowered = add_send_recv(generate("ZBV", 2, 3))
    sent, _ = messages(lowered)
    assert {(kind, stage) for link in sent.values() for kind, stage, _ in link} == {
        ("F", 1), ("F", 3), ("B", 0), ("B", 2)
    }  # fmt: skip


def test_two_pipelines_exchange_nothing():
    schedule = generate("DualPipe", 4, 12)
    sent, _ = messages(add_send_recv(schedule))
    received = {(kind, stage) for link in sent.values() for kind, stage, _ in link}
    assert received == {("F", stage) for stage in (1, 2, 3, 5, 6, 7)} | {("B", stage) for stage in (0, 1, 2, 4, 5, 6)}


def test_an_order_that_cannot_run_is_explained():
    schedule = schedule_of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    message = (
        r"cannot run in this order, so no messages can be placed:\n"
        r"row 1 \(rank 0\), cell 2: 0B0 waits for the gradient of 1B0 or 1I0\n"
        r"row 2 \(rank 1\), cell 1: 1F1 waits for 0F1$"
    )
    with pytest.raises(ValueError, match=message):
        add_send_recv(schedule)


def test_a_table_with_messages_is_refused():
    lowered = add_send_recv(schedule_of("0F0 0B0", "1F0 1B0"))
    with pytest.raises(ValueError, match=r"row 1 \(rank 0\), cell 2: the schedule has 0SEND_F0 already"):
        add_send_recv(lowered)


def test_receives_wait_for_their_consumer_and_do_not_overtake_each_other():
    # Rank 1 receives 1F0 and 1F1 in this order, and uses them in the opposite order.
    schedule = schedule_of("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 2F5 1F1 1F0")
    assert lines(defer_receives(schedule))[1] == "2F5 1RECV_F0 1RECV_F1 1F1 1F0"


def test_receives_pass_sends_as_far_as_these_let_them():
    schedule = schedule_of("0RECV_B0 0F1 0SEND_F1 0B0", "1RECV_F1 1B0 1SEND_B0 2F9 2SEND_F9 1F1", "3RECV_F9 3F9")
    rows = {transport: lines(defer_receives(schedule, transport))[:2] for transport in TRANSPORTS}
    assert {row for row, _ in rows.values()} == {"0F1 0RECV_B0 0SEND_F1 0B0"}, "no send to a higher rank may be passed"
    assert [row for _, row in rows.values()] == [
        "1B0 1SEND_B0 2F9 2SEND_F9 1RECV_F1 1F1",
        "1B0 1RECV_F1 1SEND_B0 2F9 2SEND_F9 1F1",
        "1B0 1RECV_F1 1SEND_B0 2F9 2SEND_F9 1F1",
    ]
    other = schedule_of("0F1 0SEND_F1", "1RECV_F1 2F9 2SEND_F9 1F1", "3RECV_F9 3F9")
    assert lines(defer_receives(other, "queued"))[1] == "2F9 2SEND_F9 1RECV_F1 1F1"
    assert lines(defer_receives(other, "rendezvous"))[1] == "2F9 1RECV_F1 2SEND_F9 1F1"
    with pytest.raises(ValueError, match="transport must be one of 'buffered', 'queued', 'rendezvous', not 'fast'"):
        defer_receives(schedule, "fast")


def deferred_schedules():
    """Yield the schedules of every generator at a few sizes, with messages."""
    for name in GENERATORS:
        for ranks in (2, 3, 4, 6):
            for microbatches in (2, 8, 12):
                try:
                    yield name, add_send_recv(generate(name, ranks, microbatches))
                except ValueError:
                    continue


def test_deferred_receives_do_not_deadlock_on_their_transport():
    deadlocked = set()
    for name, schedule in deferred_schedules():
        late = {transport: defer_receives(schedule, transport) for transport in TRANSPORTS}
        assert finishes(schedule, "rendezvous"), name
        for transport, each in late.items():
            assert finishes(each, transport), (name, transport)
            if not finishes(late["buffered"], transport):
                deadlocked.add((transport, name))
        for later, earlier in (("rendezvous", "queued"), ("rendezvous", "buffered"), ("queued", "buffered")):
            assert finishes(late[later], earlier), (later, earlier, name)
    # Receives that are deferred for another transport do deadlock, and the machine of this test detects that.
    assert {("queued", "1F1B"), ("rendezvous", "1F1B"), ("queued", "ZBVZeroBubble")} <= deadlocked


def test_a_receive_that_nothing_consumes_is_refused():
    with pytest.raises(ValueError, match=r"row 2 \(rank 1\), cell 3: no action after 1RECV_F0 consumes"):
        defer_receives(schedule_of("0F0 0SEND_F0", ". . 1RECV_F0 1F1"))


def test_sends_are_waited_for():
    lowered = add_send_waits(add_send_recv(schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")))
    assert lines(lowered) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0WAIT_SEND_F0 0RECV_B1 0B1 0WAIT_SEND_F1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1WAIT_SEND_B0 1WAIT_SEND_B1",
    ]
    with pytest.raises(ValueError, match=r"row 1 \(rank 0\), cell 3: 0SEND_F0 is in the row twice"):
        add_send_waits(schedule_of("0F0 0SEND_F0 0SEND_F0"))


@pytest.mark.parametrize("name", GENERATORS)
def test_every_schedule_can_be_lowered_and_runs_to_its_end(name):
    late = {"waits": True, "late_reduce_waits": True, "deferred": True}
    lowerings = ({}, {"deferred": True}, {"waits": True}, late)
    for ranks in (1, 2, 3, 4, 6):
        for microbatches in (1, 3, 8, 12):
            try:
                schedule = generate(name, ranks, microbatches)
            except ValueError:
                continue
            before = hash(schedule)
            for arguments in lowerings:
                lowered = lower(schedule, **arguments)
                assert in_order(lowered)
                assert finishes(lowered, "queued" if "deferred" in arguments else "rendezvous")
                assert Schedule.from_rows(lowered.rows, schedule.placement, schedule.microbatches, schedule.pipelines)
            assert hash(schedule) == before
