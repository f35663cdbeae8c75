"""Pass: merge a gradient of the input (I), and the gradients of the weights (W) after it, into one full backward."""

from __future__ import annotations

from ..action import BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD, Action
from ..schedule import Row, Schedule


def merge_backward(schedule: Schedule) -> Schedule:
    """Merge every I that is directly followed by the W of the same stage and microbatch into a B.

    A full backward computes only once what I and W have in common. Empty cells are left out. The result equals that of
    ``_merge_bw`` of torch, but the argument is not emptied.
    """
    return schedule.with_rows(_merged(row) for row in schedule.rows)


def _merged(row: Row) -> list[Action]:
    """Return one merged row."""
    merged: list[Action] = []
    for action in row:
        if action is None:
            continue
        before = merged[-1] if merged else None
        if action.kind == BACKWARD_WEIGHT and before == action._replace(kind=BACKWARD_INPUT):
            merged[-1] = action._replace(kind=FULL_BACKWARD)
        else:
            merged.append(action)
    return merged
