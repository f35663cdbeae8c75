"""The schedule that a runtime runs: the one that it was given, with its messages, proven."""

from __future__ import annotations

from ..action import COMMUNICATION, FORWARD, WHOLE_STAGE, Action
from ..generators import generate
from ..lowering import add_send_recv, defer_receives, lower
from ..schedule import Schedule
from ..verify import verify


def complete(schedule: Schedule | str, ranks: int, stages: int, microbatches: int | None) -> Schedule:
    """Return the schedule to run, with its messages.

    Raises:
        ValueError: `verify` finds a problem, or the schedule is for other numbers of ranks or microbatches.
    """
    if isinstance(schedule, str):
        count = 2 * ranks if microbatches is None else microbatches
        schedule = generate(schedule, ranks=ranks, microbatches=count, stages_per_rank=stages)
    elif not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is a {type(schedule).__name__}: it must be a Schedule, or the name of a generator")
    elif microbatches not in (None, schedule.microbatches):
        raise ValueError(f"microbatches is {microbatches}, and the schedule has {schedule.microbatches}")
    if schedule.ranks != ranks:
        raise ValueError(f"the schedule is for {schedule.ranks} ranks, and the group has {ranks}")
    kinds = schedule.kinds
    if kinds.isdisjoint(COMMUNICATION):
        gathers = not kinds.isdisjoint(WHOLE_STAGE)
        schedule = defer_receives(add_send_recv(schedule), "queued") if gathers else _lowered(schedule)
    report = verify(schedule, transport="queued")
    if not report.ok:
        raise ValueError(f"the schedule does not hold: {report}")
    return schedule


def _lowered(schedule: Schedule) -> Schedule:
    """Return the schedule with messages. Receives are as late as "queued" allows, since a waiting rank is idle."""
    return lower(schedule, deferred=True, transport="queued")


def forwards(schedule: Schedule) -> Schedule:
    """Return the schedule of the forwards alone, in their order, with the messages and the gathers that they need."""
    rows: list[list[Action | None]] = []
    for row in schedule.rows:
        leaves = [leaf for action in row if action for leaf in action.leaves]
        rows.append([leaf for leaf in leaves if leaf.kind == FORWARD])
    return _lowered(schedule.with_rows(rows))
