"""Pass: receive as late as possible, since on some devices a pending receive holds up other work of the network.

A receive moves behind what its rank does without it, up to the action that consumes it. Messages of a link are matched
in order, so it takes all earlier receives from the same peer along, and never overtakes one. How far it may move past
sends depends on the transport:

- "buffered": a send waits for nothing. The message lies in memory until the receiver takes it, as with a ring of slots
  in symmetric memory. The receive may pass sends to ranks below its own; of two ranks that exchange messages, the lower
  one still receives first.
- "queued": a send returns at once, but all messages between two ranks, in both directions, pass one queue in order,
  as with an NCCL communicator of two ranks, on which torch's runtime sends. The receive passes no send to its peer.
- "rendezvous": a send, and a receive, waits until the other side is there. The receive passes no send at all.

Why this does not deadlock: number all actions in the order in which `add_send_recv` placed them, a send and its receive
alike. Give a receive that moved a number between those of its new neighbours, and a message the number of its receive.
Numbers grow along each rank, and they grow along each queue, because what shares a queue keeps its order. Every action
and every message waits for smaller numbers only: what comes before it on its rank, its send, the messages before it in
its queue. So the unfinished one with the smallest number can go on. With a rendezvous, all messages of a rank keep
their order, and so their numbers: it is computation that moved ahead, past receives that it does not need.
"""

from __future__ import annotations

from collections import deque

from ..action import BACKWARDS, FORWARD, RECV_B, RECV_F, SEND_B, SEND_F, Action
from ..schedule import Row, Schedule, where

TRANSPORTS = ("buffered", "queued", "rendezvous")


def defer_receives(schedule: Schedule, transport: str = "queued") -> Schedule:
    """Move every receive as far back as the rules above let it. Empty cells are left out.

    With "buffered" it equals ``_defer_recv_ops`` of torch 2.13 and 2.15 wherever that keeps the order of messages: it
    swaps an activation and a gradient that travel between the same two ranks in ZBV, in DualPipeV, and in the
    interleaved zero bubble on two ranks.

    Args:
        transport: how sends and receives wait, as above.

    Raises:
        ValueError: ``transport`` is none of these, or a receive is not followed by an action that consumes it.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}, not {transport!r}")
    return schedule.with_rows(_deferred(schedule, rank, row, transport) for rank, row in enumerate(schedule.rows))


class _Held:
    """Receives of a rank that were not placed yet, in queues whose order is kept, with their cells."""

    def __init__(self, result: list[Action], one_queue: bool) -> None:
        self.queues: dict[int, deque[tuple[Action, int]]] = {}
        self.queue_of: dict[Action, int] = {}
        self.result, self.one_queue = result, one_queue

    def add(self, receive: Action, cell: int, peer: int) -> None:
        """Hold a receive from a peer."""
        queue = self.queue_of[receive] = 0 if self.one_queue else peer
        self.queues.setdefault(queue, deque()).append((receive, cell))

    def place(self, last: Action) -> None:
        """Place a receive, if it is held, and what is held before it in its queue."""
        while last in self.queue_of:
            self._place_first(self.queues[self.queue_of[last]])

    def place_all(self, peer: int) -> None:
        """Place what is held in the queue of a peer."""
        queue = self.queues.get(0 if self.one_queue else peer)
        while queue:
            self._place_first(queue)

    def _place_first(self, queue: deque[tuple[Action, int]]) -> None:
        receive, _ = queue.popleft()
        del self.queue_of[receive]
        self.result.append(receive)


def _deferred(schedule: Schedule, rank: int, row: Row, transport: str) -> list[Action]:
    """One row."""
    result: list[Action] = []
    held = _Held(result, one_queue=transport == "rendezvous")
    for cell, action in enumerate(row):
        if action is None:
            continue
        if action.kind in (RECV_F, RECV_B):
            held.add(action, cell, schedule.rank_of(action.stage + (-1 if action.kind == RECV_F else 1)))
            continue
        if action.kind in (SEND_F, SEND_B):
            peer = schedule.rank_of(action.stage + (1 if action.kind == SEND_F else -1))
            if transport != "buffered" or rank < peer:
                held.place_all(peer)
        for leaf in action.leaves:
            consumed = RECV_F if leaf.kind == FORWARD else RECV_B if leaf.kind in BACKWARDS else None
            if consumed:
                held.place(Action(leaf.stage, consumed, leaf.microbatch))
        result.append(action)
    for receive, cell in (each for queue in held.queues.values() for each in queue):
        raise ValueError(f"{where(rank, cell)}: no action after {receive} consumes what it receives")
    return result
