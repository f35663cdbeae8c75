"""Pass: a gradient of the input that is followed by that of the weights becomes one full backward."""

from __future__ import annotations

from ..action import BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD, Action
from ..schedule import Row, Schedule


def merge_backward(schedule: Schedule) -> Schedule:
    """Every I that is followed by the W of the same stage and microbatch becomes a B; empty cells are left out.

    A full backward computes what both share only once. It equals ``_merge_bw`` of torch, without emptying its argument.
    """
    return schedule.with_rows(_merged(row) for row in schedule.rows)


def _merged(row: Row) -> list[Action]:
    """One row."""
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
