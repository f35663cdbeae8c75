"""Run a schedule without a clock, and explain why it stops if it does.

Every rank runs its cells in order. What a cell waits for depends on how sends and receives are carried out:

- "rendezvous": each blocks its rank until the other side has arrived too. A schedule without deadlock here has none
  with any other transport.
- "queued": they return at once, but all messages between two ranks, in both directions, pass through one queue in
  order, as with NCCL. An action that uses a message, or waits for a send, blocks its rank until the message has passed.
- "batched": adjacent ones in a row start together, and block the rank until all are done.
- "buffered": a send never blocks. A receive blocks until its send has been run. This is how symmetric memory works.

If a schedule has no sends and receives, a forward waits for the forward of the previous stage, and a backward for the
backward of the next stage.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from ..action import AWAITED_SENDS, BACKWARDS, FORWARD, MESSAGES, RECV_B, RECV_F, RECVS, SENDS, Action
from .links import counterpart
from .problem import Index, Place, Problem

TRANSPORTS = ("rendezvous", "batched", "queued", "buffered")


class Wait(NamedTuple):
    """A place that waits, and the actions that it waits for: any one of them is enough."""

    place: Place
    wanted: tuple[Action, ...]


def deadlocks(index: Index, transport: str, communicates: bool) -> Iterator[Problem]:
    """Find the rings of actions that wait for each other, and actions that wait for something that never comes."""
    run = _Run(index, transport, communicates)
    stuck = run.stuck()
    seen: set[int] = set()
    reported: set[frozenset[int]] = set()  # queues whose ends differ, and that have been reported
    for start in stuck:
        path: list[Place] = []
        rank: int | None = start
        while rank is not None and rank not in seen:
            seen.add(rank)
            wait = stuck.get(rank)
            if wait is None:  # what it waited for runs in two places (problem "duplicated"), and one of them has run
                break
            path.append(wait.place)
            target = run.awaited(wait)
            if target is None:
                wanted = " or ".join(map(str, wait.wanted)) or "a send of a stage that does not exist"
                yield Problem("deadlock", (wait.place,), f"it waits for {wanted}, which no rank runs")
            rank = None if target is None else target.rank
            if target is not None and run.crossed(target):
                rank = None
                if run.queue_of(target) in reported:
                    break
                reported.add(run.queue_of(target))
                text = f"it waits for a message after {target.action} in a queue whose other end expects another one"
                yield Problem("deadlock", (wait.place, target), text)
        ranks = [place.rank for place in path]
        if rank in ranks:  # otherwise the path leads to a problem that was reported before
            yield _ring(run, path[ranks.index(rank) :], stuck)
    if not stuck:
        for place in run.left_over():
            yield Problem("deadlock", (place,), "it never passes its queue: the other end expects another message")


def _ring(run: _Run, ring: list[Place], stuck: dict[int, Wait]) -> Problem:
    sentences = []
    for place in ring:
        target = run.awaited(stuck[place.rank])
        assert target is not None
        head = stuck[target.rank].place
        behind = "" if target.cell == head.cell else f", which comes after {head.action}"
        sentences.append(
            f"rank {place.rank} is at {place.action} and waits for {target.action} of rank {target.rank}{behind}"
        )
    return Problem("deadlock", tuple(ring), "; ".join(sentences))


class _Run:
    """How far every rank gets.

    A rank is in a group of cells: one cell, or with "batched" all adjacent sends and receives. It continues once every
    cell of the group has what it waits for.
    """

    def __init__(self, index: Index, transport: str, communicates: bool) -> None:
        self._schedule, self._index = index.schedule, index
        self._transport, self._communicates = transport, communicates
        ranks = index.schedule.ranks
        self._position = [0] * ranks  # where the current group of each rank starts, among its places
        self._end = [0] * ranks
        self._there: set[Action] = set()  # actions that have started; if sends do not block, that are done
        self._blocked: defaultdict[Action, list[int]] = defaultdict(list)
        self._unmet = [0] * ranks
        self._queues: defaultdict[tuple[int, int], deque[Place]] = defaultdict(deque)  # (rank, peer): "queued" only
        runnable: list[int] = []
        for rank in range(ranks):
            self._begin(rank, runnable)
        runnable += range(ranks)
        while runnable:
            rank = runnable.pop()
            while self._unmet[rank] == 0 and self._position[rank] < len(index.places[rank]):
                self._finish(rank, runnable)
                self._begin(rank, runnable)

    def stuck(self) -> dict[int, Wait]:
        """Return for each rank that did not reach its end what it waits for."""
        found: dict[int, Wait] = {}
        for rank, places in enumerate(self._index.places):
            for place in places[self._position[rank] : self._end[rank]]:
                wanted = self._wanted(place.action)
                if wanted is not None and self._there.isdisjoint(wanted):
                    found.setdefault(rank, Wait(place, wanted))
        return found

    def awaited(self, wait: Wait) -> Place | None:
        """Return what a rank would have to run so that a wait may end, or the head of a queue that never moves on."""
        found = next((at for at in map(self._index.first, wait.wanted) if at is not None), None)
        if self._transport != "queued" or found is None or found.action.kind not in MESSAGES:
            return found
        queue = self._queues[found.rank, self._peer(found)]
        if found not in queue:  # it comes after the action that waits for it
            return found
        head = queue[0]
        other = counterpart(self._schedule, head.action)
        return head if self.crossed(head) else None if other is None else self._index.first(other)

    def crossed(self, head: Place) -> bool:
        """True if the other end of a queue has a first message too, and it is another message."""
        if self._transport != "queued" or head.action.kind not in MESSAGES:
            return False
        peer = self._peer(head)
        queue, others = self._queues[head.rank, peer], self._queues[peer, head.rank]
        return bool(queue and others) and queue[0] == head

    def queue_of(self, message: Place) -> frozenset[int]:
        """Return the two ranks whose messages pass through one queue."""
        return frozenset((message.rank, self._peer(message)))

    def left_over(self) -> Iterator[Place]:
        """Yield the first message of each queue that is not empty."""
        for queue in self._queues.values():
            yield from list(queue)[:1]

    def _peer(self, place: Place) -> int:
        """Return the rank at the other end of a message, or the rank itself if there is none."""
        other = counterpart(self._schedule, place.action)
        return place.rank if other is None else self._schedule.placement[other.stage]

    def _post(self, place: Place, runnable: list[int]) -> None:
        """Put a message into its queue, and remove the messages that match the other end."""
        peer = self._peer(place)
        self._queues[place.rank, peer].append(place)
        queue, others = self._queues[place.rank, peer], self._queues[peer, place.rank]
        while peer != place.rank and queue and others:
            if counterpart(self._schedule, queue[0].action) != others[0].action:
                return
            self._tell([queue.popleft().action, others.popleft().action], runnable)

    def _begin(self, rank: int, runnable: list[int]) -> None:
        """Enter the next group: notify the ranks that wait for its start, and count what the group itself waits for."""
        places = self._index.places[rank]
        start = end = self._position[rank]
        while end < len(places) and (places[end].cell == places[start].cell or self._joins(places[start], places[end])):
            end += 1
        self._end[rank] = end
        group = places[start:end]
        if self._transport in ("rendezvous", "batched"):
            self._tell([place.action for place in group if place.action.kind in MESSAGES], runnable)
        for place in group:
            wanted = self._wanted(place.action)
            if wanted is None or not self._there.isdisjoint(wanted):
                continue
            self._unmet[rank] += 1
            for action in wanted:
                if action in self._index.of:  # one of several is enough, and only one of them exists: see counts.py
                    self._blocked[action].append(rank)
                    break

    def _joins(self, first: Place, other: Place) -> bool:
        both = {first.action.kind, other.action.kind}
        return self._transport == "batched" and both <= MESSAGES

    def _finish(self, rank: int, runnable: list[int]) -> None:
        group = self._index.places[rank][self._position[rank] : self._end[rank]]
        if self._transport == "queued":
            for place in group:
                if place.action.kind in MESSAGES:
                    self._post(place, runnable)
            group = [place for place in group if place.action.kind not in MESSAGES]
        self._tell([place.action for place in group], runnable)
        self._position[rank] = self._end[rank]

    def _tell(self, actions: list[Action], runnable: list[int]) -> None:
        for action in actions:
            self._there.add(action)
            for rank in self._blocked.pop(action, ()):
                self._unmet[rank] -= 1
                runnable.append(rank)

    def _wanted(self, action: Action) -> tuple[Action, ...] | None:
        """Return what another rank must start or finish before this action is done: any one of these. None for
        nothing."""
        if self._transport == "queued" and self._communicates:
            return self._passed(action)
        if action.kind in RECVS or (action.kind in SENDS and self._transport != "buffered"):
            other = counterpart(self._schedule, action)
            return () if other is None else (other,)
        return None if self._communicates else self._made_elsewhere(action)

    def _passed(self, action: Action) -> tuple[Action, ...] | None:
        """Return the message of its own rank that must have passed its queue before an action runs."""
        if action.kind in AWAITED_SENDS:
            return (Action(action.stage, AWAITED_SENDS[action.kind], action.microbatch),)
        if self._made_elsewhere(action) is None:
            return None
        return (Action(action.stage, RECV_F if action.kind == FORWARD else RECV_B, action.microbatch),)

    def _made_elsewhere(self, action: Action) -> tuple[Action, ...] | None:
        """Return what a forward or a backward needs from another rank's compute: any one of these. None if nothing."""
        schedule = self._schedule
        made: tuple[str, ...]
        if action.kind == FORWARD:
            neighbour, made = schedule.previous_stage(action.stage), (FORWARD,)
        elif action.kind in BACKWARDS:
            neighbour, made = schedule.next_stage(action.stage), BACKWARDS
        else:
            return None
        if neighbour is None or schedule.placement[neighbour] == schedule.placement[action.stage]:
            return None
        return tuple(Action(neighbour, kind, action.microbatch) for kind in made)
