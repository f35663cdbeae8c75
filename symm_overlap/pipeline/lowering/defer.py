"""Pass: receive as late as possible, since on some devices a pending receive delays other work of the network.

A receive moves behind actions of its rank that do not need it, up to the action that consumes it. Messages of a link
are matched in order, so a receive stays behind all earlier receives from the same peer. How far it may move past sends
depends on the transport:

- "buffered": a send waits for nothing. The message stays in memory until the receiver copies it, as with a ring of
  slots in symmetric memory. The receive may move past a send to its peer only if the peer is a lower rank. So if two
  ranks exchange messages, the lower one still receives first.
- "queued": a send returns at once, but all messages between two ranks, in both directions, pass through one queue in
  order. This is the case with an NCCL communicator of two ranks, on which torch's runtime sends. The receive does not
  move past any send to its peer.
- "rendezvous": a send or a receive waits until the other side has reached it. The receive does not move past any send.

Why this does not deadlock: number all actions in the order in which `add_send_recv` placed them, and give a send and
its receive the same number. Give each receive that has moved a number between those of its new neighbours, and give
each message the number of its receive. Numbers increase along each rank. They also increase along each queue, because
messages in one queue keep their order. Every action and every message waits only for smaller numbers: those of the
actions before it on its rank, of its send, and of the messages before it in its queue. So the unfinished action or
message with the smallest number can proceed. With "rendezvous", all messages of a rank keep their order, and therefore
their numbers. Only computation has moved ahead, past receives that it does not need.
"""

from __future__ import annotations

from collections import deque

from ..action import BACKWARDS, FORWARD, RECV_B, RECV_F, RECVS, SEND_F, SENDS, Action
from ..schedule import Row, Schedule, where

TRANSPORTS = ("buffered", "queued", "rendezvous")


def defer_receives(schedule: Schedule, transport: str = "queued") -> Schedule:
    """Move every receive as far back as the rules of this module allow. Empty cells are left out.

    With "buffered", the result equals that of ``_defer_recv_ops`` of torch 2.13 and 2.15 wherever torch's pass keeps
    the order of messages. Torch's pass swaps an activation and a gradient between the same two ranks in ZBV, in
    DualPipeV, and in the interleaved zero bubble on two ranks.

    Args:
        schedule: a schedule with its sends and receives.
        transport: how sends and receives wait: "buffered", "queued" or "rendezvous"; see the module.

    Raises:
        ValueError: ``transport`` is none of these, or a receive is not followed by an action that consumes it.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}, not {transport!r}")
    return schedule.with_rows(_deferred(schedule, rank, row, transport) for rank, row in enumerate(schedule.rows))


class _Held:
    """The receives of a rank that were not placed yet, with their cells, in queues whose order is kept."""

    def __init__(self, result: list[Action], one_queue: bool) -> None:
        self.queues: dict[int, deque[tuple[Action, int]]] = {}
        self.queue_of: dict[Action, int] = {}
        self.result, self.one_queue = result, one_queue

    def add(self, receive: Action, cell: int, peer: int) -> None:
        """Hold a receive from a peer."""
        queue = self.queue_of[receive] = 0 if self.one_queue else peer
        self.queues.setdefault(queue, deque()).append((receive, cell))

    def place(self, last: Action) -> None:
        """Place a receive, if it is held, and the receives that are held before it in its queue."""
        while last in self.queue_of:
            self._place_first(self.queues[self.queue_of[last]])

    def place_all(self, peer: int) -> None:
        """Place all receives that are held in the queue of a peer."""
        queue = self.queues.get(0 if self.one_queue else peer)
        while queue:
            self._place_first(queue)

    def _place_first(self, queue: deque[tuple[Action, int]]) -> None:
        receive, _ = queue.popleft()
        del self.queue_of[receive]
        self.result.append(receive)


def _deferred(schedule: Schedule, rank: int, row: Row, transport: str) -> list[Action]:
    """Return one row with deferred receives."""
    result: list[Action] = []
    held = _Held(result, one_queue=transport == "rendezvous")
    for cell, action in enumerate(row):
        if action is None:
            continue
        if action.kind in RECVS:
            held.add(action, cell, schedule.rank_of(action.stage + (-1 if action.kind == RECV_F else 1)))
            continue
        if action.kind in SENDS:
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
