"""Pass: receive as late as possible, since on some devices a pending receive holds up other work of the network.

A receive moves behind what its rank does without it, up to one of

1. the action that consumes it,
2. a send to the same peer, if that has a higher rank: of two ranks that exchange messages, the lower one posts its
   receive first,
3. a later receive from the same peer, which must not overtake it: messages of a link are matched in order.

Why it does not deadlock, where a send does not wait for its receiver: number all actions in the order in which
`add_send_recv` placed them. Every action waits only for actions with smaller numbers: for what comes before it on its
rank, and a receive for its send. Give a receive that moved a number between those of its new neighbours. It only grows,
so it is still larger than that of its send; and numbers still grow along each rank. So the unfinished action with the
smallest number can always run. Where sends do wait, rule 2 helps but proves nothing: verify the schedule for that.
"""

from __future__ import annotations

from collections import deque

from ..action import BACKWARDS, FORWARD, RECV_B, RECV_F, SEND_B, SEND_F, Action
from ..schedule import Row, Schedule, where


def defer_receives(schedule: Schedule) -> Schedule:
    """Move every receive as far back as the rules above let it. Empty cells are left out.

    Equals ``_defer_recv_ops`` of torch 2.13 and 2.15 wherever that keeps the order of messages. It lacks rule 3, and
    swaps an activation and a gradient that travel between the same two ranks in ZBV, in DualPipeV, and in the
    interleaved zero bubble on two ranks.

    Raises:
        ValueError: a receive is not followed by an action that consumes it.
    """
    return schedule.with_rows(_deferred(schedule, rank, row) for rank, row in enumerate(schedule.rows))


def _deferred(schedule: Schedule, rank: int, row: Row) -> list[Action]:
    """One row."""
    held: list[deque[tuple[Action, int]]] = [deque() for _ in schedule.rows]  # by peer: receives, and their cells
    waiting: dict[Action, int] = {}  # the receives in ``held``, with their peers
    result: list[Action] = []

    def place(peer: int, last: Action | None) -> None:
        """Place what is held from a peer, up to one receive, or all of it."""
        while held[peer] and (last is None or last in waiting):
            receive, _ = held[peer].popleft()
            del waiting[receive]
            result.append(receive)

    for cell, action in enumerate(row):
        if action is None:
            continue
        if action.kind in (RECV_F, RECV_B):
            peer = schedule.rank_of(action.stage + (-1 if action.kind == RECV_F else 1))
            held[peer].append((action, cell))
            waiting[action] = peer
            continue
        if action.kind in (SEND_F, SEND_B):
            peer = schedule.rank_of(action.stage + (1 if action.kind == SEND_F else -1))
            if rank < peer:
                place(peer, None)
        for leaf in action.leaves:
            consumed = RECV_F if leaf.kind == FORWARD else RECV_B if leaf.kind in BACKWARDS else None
            needed = consumed and Action(leaf.stage, consumed, leaf.microbatch)
            if needed in waiting:
                place(waiting[needed], needed)
        result.append(action)
    for receive, cell in (each for queue in held for each in queue):
        raise ValueError(f"{where(rank, cell)}: no action after {receive} consumes what it receives")
    return result
