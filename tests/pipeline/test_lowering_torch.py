"""If the installed torch has a pass, ours gives the same result, action for action."""

import random

import pytest
from torch.distributed.pipelining import schedules

from symm_overlap.pipeline import from_torch, to_torch
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

from .links import in_order
from .torch_tables import torch_schedule

WAITS = hasattr(schedules, "_add_wait_send")
"""Whether the installed torch inserts waits, as 2.15 does."""
DEFERS = hasattr(schedules, "_defer_recv_ops")


def of_torch(rows):
    """Return torch's rows as text: (action, ...) for each rank."""
    return tuple(tuple(str(action) for action in row) for row in rows)


def text(schedule):
    """Return our rows as text."""
    return of_torch(schedule.rows)


def some_schedules(count, seed=0):
    """Yield schedules of random sizes, from all generators that create one pipeline."""
    source = random.Random(seed)
    names = [name for name in GENERATORS if name != "DualPipe"]
    while count:
        name = source.choice(names)
        stages = source.randint(1, 4) if name in ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble") else None
        try:
            schedule = generate(name, source.randint(1, 7), source.randint(1, 20), stages)
        except ValueError:
            continue
        count -= 1
        yield schedule


def test_merge_equals_torch():
    for schedule in some_schedules(60):
        expected = of_torch(schedules._merge_bw(row) for row in to_torch(schedule).values())
        assert text(merge_backward(schedule)) == expected


def test_unshard_and_reshard_equal_torch():
    for schedule in some_schedules(60):
        for window in (2, 3, 4):
            expected = of_torch(schedules._add_unshard_reshard(row, window) for row in to_torch(schedule).values())
            assert text(add_unshard_reshard(schedule, window)) == expected
        assert add_unshard_reshard(schedule) == add_unshard_reshard(schedule, 3)


@pytest.mark.skipif(not WAITS, reason="this torch has no look-ahead")
def test_look_ahead_equals_torch():
    for schedule in some_schedules(60):
        for ahead in (2, 3):
            rows = to_torch(schedule).values()
            expected = of_torch(schedules._add_unshard_reshard(row, 4, unshard_lookahead=ahead) for row in rows)
            assert text(add_unshard_reshard(schedule, 4, ahead)) == expected


@pytest.mark.parametrize("waits", ["at once", "late"] if WAITS else ["none"])
def test_reduce_grad_equals_torch(waits):
    late = {"defer_reduce_grad_wait": True} if waits == "late" else {}
    for schedule in some_schedules(60):
        rows = to_torch(schedule).values()
        expected = of_torch(schedules._add_reduce_grad(row, schedule.microbatches, **late) for row in rows)
        assert text(add_reduce_grad(schedule, waits)) == expected


def test_send_and_receive_equal_torch():
    for schedule in some_schedules(120):
        table = schedules._add_send_recv(to_torch(schedule), schedule.rank_of, schedule.stages)
        assert text(add_send_recv(schedule)) == of_torch(table[rank] for rank in range(schedule.ranks))


@pytest.mark.skipif(not DEFERS, reason="this torch cannot defer receives")
def test_deferred_receives_equal_torch_where_torch_keeps_the_order_of_messages():
    kept = swapped = 0
    for schedule in some_schedules(120):
        lowered = add_send_recv(schedule)
        table = schedules._defer_recv_ops(to_torch(lowered), schedule.rank_of)
        ours = defer_receives(lowered, "buffered")
        assert in_order(ours)
        if in_order(from_torch(table)):
            kept += 1
            assert text(ours) == of_torch(table[rank] for rank in range(schedule.ranks))
        else:
            swapped += 1
    assert kept > 60
    assert swapped, "torch keeps the order of messages now: compare all of its schedules"


@pytest.mark.skipif(not WAITS, reason="this torch does not wait for sends")
def test_waits_for_sends_equal_torch():
    for schedule in some_schedules(60):
        lowered = add_send_recv(schedule)
        table = schedules._add_wait_send(to_torch(lowered))
        assert text(add_send_waits(lowered)) == of_torch(table[rank] for rank in range(schedule.ranks))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "stages"),
    [
        ("LoopedBFS", 3, 5, 2),
        ("Interleaved1F1B", 4, 10, 3),
        ("InterleavedZeroBubble", 3, 6, 2),
        ("ZBVZeroBubble", 4, 9, 2),
        ("DualPipeV", 3, 8, 2),
    ],
)
def test_all_passes_together_equal_what_torchs_runtime_runs(name, ranks, microbatches, stages):
    schedule = generate(name, ranks, microbatches, stages)
    table = torch_schedule(name, ranks, microbatches, stages).pipeline_order_with_comms
    assert text(lower(schedule, waits=WAITS)) == of_torch(table[rank] for rank in range(ranks))
    if DEFERS and name not in ("ZBVZeroBubble", "DualPipeV"):  # for these, torch swaps messages
        table = torch_schedule(name, ranks, microbatches, stages, defer_pp_recv=True).pipeline_order_with_comms
        ours = text(lower(schedule, waits=WAITS, deferred=True, transport="buffered"))
        assert ours == of_torch(table[rank] for rank in range(ranks))


@pytest.mark.parametrize(
    ("stages", "microbatches", "ranks", "placed", "deferred", "rendezvous"),
    [(2, 8, 4, 149, 102, 115), (4, 32, 8, 2079, 790, 1301)],
)
def test_steps_of_torchs_simulator(stages, microbatches, ranks, placed, deferred, rendezvous):
    """The numbers hold if the generators' empty cells are kept while messages are placed."""
    lowered = add_send_recv(generate("Interleaved1F1B", ranks, microbatches, stages))
    late = {transport: defer_receives(lowered, transport) for transport in ("buffered", "queued", "rendezvous")}
    for schedule, expected in (
        (lowered, placed),
        (late["buffered"], deferred),
        (late["queued"], deferred),
        (late["rendezvous"], rendezvous),
    ):
        ran = schedules._simulate_comms_compute(to_torch(schedule), schedule.rank_of, schedule.stages)
        assert max(map(len, ran.values())) == expected
