"""Compute how many slots each link needs so that no sender ever waits for its receiver.

A link carries the activations, or the gradients, that one stage sends to its neighbour on another rank. Its messages go
through a ring of slots in the receiver's memory. Message k uses slot k modulo the number of slots, and the receiver
copies it out of the slot. A sender may use a slot again once it knows that the receiver has copied the slot's message
out. It knows that from the messages that it has received itself. The order of the schedule determines when that is the
case in every run, so receivers never have to signal that a slot is free:

- Every rank knows a lower bound on the progress of each other rank. A message passes on what its sender knew.
- When a rank sends message k of a link, counted from 0, and knows that j of its messages have been received, then
  k - j + 1 slots are in use.

The largest of these numbers is the size of the ring. In schedules of forwards alone, nothing comes back, so a link
needs a slot for each microbatch.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .action import RECV_B, RECV_F, RECVS, SEND_B, SEND_F, Action
from .schedule import Schedule

_OTHER_END = {SEND_F: (RECV_F, 1), SEND_B: (RECV_B, -1)}


class Link(NamedTuple):
    """The messages that a stage sends in one direction.

    Attributes:
        stage: the stage that sends.
        kind: the kind of its sends: ``SEND_F`` for activations, ``SEND_B`` for gradients.
        source, target: the ranks of the sender and of the receiver.
        slots: the number of slots of the ring.
        slot_of: for each microbatch, the slot of its message.
    """

    stage: int
    kind: str
    source: int
    target: int
    slots: int
    slot_of: dict[int, int]


def links(schedule: Schedule) -> dict[tuple[int, str], Link]:
    """Return the links of a schedule that has its sends and receives.

    The key of a link is the stage and the kind of its sends. The keys are in ascending order.

    Raises:
        ValueError: the schedule deadlocks; `verify` says why.
    """
    orders: dict[tuple[int, str], list[int]] = {}
    for row in schedule.rows:
        for action in row:
            if action is not None and action.kind in _OTHER_END:
                assert action.microbatch is not None
                orders.setdefault((action.stage, action.kind), []).append(action.microbatch)
    sizes = _Run(schedule).sizes()
    found = {}
    for key in sorted(orders):
        stage, kind = key
        slots = sizes[key]
        slot_of = {microbatch: index % slots for index, microbatch in enumerate(orders[key])}
        target = schedule.rank_of(stage + _OTHER_END[kind][1])
        found[key] = Link(stage, kind, schedule.rank_of(stage), target, slots, slot_of)
    return found


class _Run:
    """Runs a schedule, each rank as far as it can go, and notes what each rank knows of the others' progress.

    Attributes:
        known: ``known[r][q]`` is how many cells of rank q's row are done for sure, as far as rank r knows.
        on_the_way: for each receive whose message was sent, what the sender knew when it sent the message.
        sent: for each link, how many messages were sent.
        received: for each link, the cells of the receiver's row at which its messages were received.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.known = [[0] * schedule.ranks for _ in schedule.rows]
        self.on_the_way: dict[Action, list[int]] = {}
        self.sent: dict[tuple[int, str], int] = {}
        self.received: dict[tuple[int, str], list[int]] = {}
        self._sizes: dict[tuple[int, str], int] = {}

    def sizes(self) -> dict[tuple[int, str], int]:
        """Run the schedule. Return, for each link, how many slots it needs."""
        rows, waiting = self.schedule.rows, {}
        ready = deque(range(self.schedule.ranks))
        at = [0] * self.schedule.ranks
        while ready:
            rank = ready.popleft()
            while at[rank] < len(rows[rank]):
                action = rows[rank][at[rank]]
                if action is not None and action.kind in RECVS:
                    if action not in self.on_the_way:
                        waiting[action] = rank
                        break
                    self._receive(rank, action, at[rank])
                at[rank] += 1
                self.known[rank][rank] = at[rank]
                if action is not None and action.kind in _OTHER_END:
                    receive = self._send(rank, action)
                    if receive in waiting:
                        ready.append(waiting.pop(receive))
        for rank, row in enumerate(rows):
            if at[rank] < len(row):
                raise ValueError(
                    f"rank {rank} waits for ever at {row[at[rank]]}: symm_overlap.pipeline.verify says why"
                )
        return self._sizes

    def _send(self, rank: int, send: Action) -> Action:
        """Record a send, and return its receive."""
        key = send.stage, send.kind
        kind, step = _OTHER_END[send.kind]
        receive = Action(send.stage + step, kind, send.microbatch)
        target = self.schedule.rank_of(receive.stage)
        number = self.sent.get(key, 0)
        done = self.known[rank][target]
        # The places of receives are in ascending order, and all but the last few are known: so count from the end.
        places = self.received.setdefault(key, [])
        taken = len(places)
        while taken and places[taken - 1] >= done:
            taken -= 1
        self._sizes[key] = max(self._sizes.get(key, 1), number - taken + 1)
        self.sent[key] = number + 1
        self.on_the_way[receive] = list(self.known[rank])
        return receive

    def _receive(self, rank: int, receive: Action, cell: int) -> None:
        self.known[rank] = list(map(max, self.known[rank], self.on_the_way.pop(receive)))
        kind, step = (SEND_F, -1) if receive.kind == RECV_F else (SEND_B, 1)
        self.received.setdefault((receive.stage + step, kind), []).append(cell)
