"""How many slots each link needs so that no sender ever waits for its receiver.

A link carries the activations, or the gradients, that one stage sends to its neighbour on another rank. Its messages go
through a ring of slots in the receiver's memory: message k through slot k modulo their number, out of which the
receiver copies it. A sender may use a slot again once it knows, from what it has received itself, that the message in
it has been taken out. The order of the schedule says when that is in every run, so no slot ever has to be given back:

- every rank knows how far each other rank has come at least; a message tells its receiver what the sender knew;
- when a rank sends message k of a link and knows that j messages of it have been received, k - j + 1 slots are in use.

The largest such number is the size of the ring. Schedules of forwards alone, in which nothing comes back, need a slot
for each microbatch.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .action import RECV_B, RECV_F, SEND_B, SEND_F, Action
from .schedule import Schedule

_OTHER_END = {SEND_F: (RECV_F, 1), SEND_B: (RECV_B, -1)}


class Link(NamedTuple):
    """The messages that a stage sends in one direction.

    Attributes:
        stage, kind: of the sends: ``SEND_F`` for activations, ``SEND_B`` for gradients.
        source, target: the ranks of the sender and of the receiver.
        slots: how many slots its ring has.
        slot_of: for each microbatch, the slot of its message.
    """

    stage: int
    kind: str
    source: int
    target: int
    slots: int
    slot_of: dict[int, int]


def links(schedule: Schedule) -> dict[tuple[int, str], Link]:
    """The links of a schedule that has its sends and receives, by stage and kind of their sends, in ascending order.

    Raises:
        ValueError: the schedule comes to a halt; `verify` says why.
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
        known: for each rank, how many cells of every rank's row are surely done.
        received: for each link, behind which cells of the receiver's row its messages have been received.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.known = [[0] * schedule.ranks for _ in schedule.rows]
        self.on_the_way: dict[Action, list[int]] = {}  # by their receives: what the sender knew
        self.sent: dict[tuple[int, str], int] = {}
        self.received: dict[tuple[int, str], list[int]] = {}
        self._sizes: dict[tuple[int, str], int] = {}

    def sizes(self) -> dict[tuple[int, str], int]:
        """For each link, how many slots it needs."""
        rows, waiting = self.schedule.rows, {}
        ready = deque(range(self.schedule.ranks))
        at = [0] * self.schedule.ranks
        while ready:
            rank = ready.popleft()
            while at[rank] < len(rows[rank]):
                action = rows[rank][at[rank]]
                if action is not None and action.kind in (RECV_F, RECV_B):
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
        """Note a send; return its receive."""
        key = send.stage, send.kind
        kind, step = _OTHER_END[send.kind]
        receive = Action(send.stage + step, kind, send.microbatch)
        target = self.schedule.rank_of(receive.stage)
        number = self.sent.get(key, 0)
        done = self.known[rank][target]
        # The places of receives only grow, and all but the last few are known: counted from the end.
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
