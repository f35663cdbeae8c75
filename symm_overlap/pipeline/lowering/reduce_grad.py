"""Pass: sum the gradients of a stage over the data-parallel ranks, once, after its last backward."""

from __future__ import annotations

from ..action import BACKWARD_WEIGHT, FULL_BACKWARD, REDUCE_GRAD, WAIT_REDUCE_GRAD, Action
from ..schedule import Row, Schedule

WAITS = ("none", "at once", "late")


def add_reduce_grad(schedule: Schedule, waits: str = "none") -> Schedule:
    """Add the REDUCE_GRAD of each stage directly after its last W or B. Empty cells are left out.

    Args:
        schedule: the schedule to which reductions are added.
        waits: "none" adds no waits, as ``_add_reduce_grad`` of torch 2.11 and 2.13, where the runtime itself waits.
            "at once" adds WAIT_REDUCE_GRAD directly after each reduction, as torch 2.15 without
            ``defer_reduce_grad_wait``. "late" adds it before the next reduction on the rank or at the end of the row,
            as torch 2.15 with this option. At most one reduction is then in flight.

    Raises:
        ValueError: ``waits`` is none of these.
    """
    if waits not in WAITS:
        raise ValueError(f"waits must be one of {', '.join(map(repr, WAITS))}, not {waits!r}")
    return schedule.with_rows(_reduced(schedule, row, waits) for row in schedule.rows)


def _reduced(schedule: Schedule, row: Row, waits: str) -> list[Action]:
    """Return one row with its reductions."""
    left = {stage: len(schedule.microbatches_of(stage)) for stage in range(schedule.stages)}
    result: list[Action] = []
    pending: list[Action] = []
    for action in row:
        if action is None:
            continue
        result.append(action)
        for leaf in action.leaves:
            if leaf.kind not in (BACKWARD_WEIGHT, FULL_BACKWARD):
                continue
            left[leaf.stage] -= 1
            if left[leaf.stage] == 0:
                result += pending
                result.append(Action(leaf.stage, REDUCE_GRAD))
                pending = [] if waits == "none" else [Action(leaf.stage, WAIT_REDUCE_GRAD)]
                if waits == "at once":
                    result += pending
                    pending = []
    return result + pending
