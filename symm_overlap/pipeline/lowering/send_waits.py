"""Pass: say where each send must be complete, so that its buffer can be used again."""

from __future__ import annotations

from ..action import BACKWARDS, SEND_B, SEND_F, WAIT_SEND_B, WAIT_SEND_F, Action
from ..schedule import Row, Schedule, where


def add_send_waits(schedule: Schedule) -> Schedule:
    """Put one WAIT_SEND_F or WAIT_SEND_B for each send. Empty cells are left out.

    A forward's send is waited for behind the backward of its microbatch on the same stage: the gradient came from the
    peer, so the peer has the activation, and the wait takes no time. A backward's send is waited for at the end of the
    row. Equals ``_add_wait_send`` of torch 2.15.

    Raises:
        ValueError: a message is sent twice.
    """
    return schedule.with_rows(_waited(rank, row) for rank, row in enumerate(schedule.rows))


def _waited(rank: int, row: Row) -> list[Action]:
    """One row."""
    pending: dict[Action, Action] = {}  # for each send that was not waited for, its wait
    result: list[Action] = []
    for cell, action in enumerate(row):
        if action is None:
            continue
        result.append(action)
        if action.kind in (SEND_F, SEND_B):
            if action in pending:
                raise ValueError(f"{where(rank, cell)}: {action} sends what was sent before and not waited for")
            pending[action] = action._replace(kind=WAIT_SEND_F if action.kind == SEND_F else WAIT_SEND_B)
        for leaf in action.leaves:
            if leaf.kind in BACKWARDS:
                wait = pending.pop(leaf._replace(kind=SEND_F), None)
                if wait is not None:
                    result.append(wait)
    return result + list(pending.values())
