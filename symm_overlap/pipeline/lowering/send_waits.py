"""Pass: add the waits for sends, after which the buffer of a send can be used again."""

from __future__ import annotations

from ..action import BACKWARDS, SEND_F, SENDS, WAIT_SEND_B, WAIT_SEND_F, Action
from ..schedule import Row, Schedule, where


def add_send_waits(schedule: Schedule) -> Schedule:
    """Add one WAIT_SEND_F or WAIT_SEND_B for each send. Empty cells are left out.

    The wait for a forward's send comes after the backward of its microbatch on the same stage. The gradient came from
    the peer, so the peer has received the activation, and the wait takes no time. The wait for a backward's send comes
    at the end of the row. The result equals that of ``_add_wait_send`` of torch 2.15.

    Raises:
        ValueError: a message is sent twice.
    """
    return schedule.with_rows(_waited(rank, row) for rank, row in enumerate(schedule.rows))


def _waited(rank: int, row: Row) -> list[Action]:
    """Return one row with its waits."""
    pending: dict[Action, Action] = {}  # for each send whose wait was not placed yet, this wait
    result: list[Action] = []
    for cell, action in enumerate(row):
        if action is None:
            continue
        result.append(action)
        if action.kind in SENDS:
            if action in pending:
                raise ValueError(f"{where(rank, cell)}: {action} is in the row twice: send each message once")
            pending[action] = action._replace(kind=WAIT_SEND_F if action.kind == SEND_F else WAIT_SEND_B)
        for leaf in action.leaves:
            if leaf.kind in BACKWARDS:
                wait = pending.pop(leaf._replace(kind=SEND_F), None)
                if wait is not None:
                    result.append(wait)
    return result + list(pending.values())
