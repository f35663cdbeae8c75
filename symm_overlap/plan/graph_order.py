"""Orders that a CUDA graph may choose: check that none of them lets the ranks wait for each other for ever.

A graph knows what a plan's streams and ``after`` say, and not the order in which the steps were issued. It may run what
is independent at the same time, or, at worst, one step of a rank at a time, in any order that these dependencies allow;
and a step that awaits a post holds up its rank meanwhile. So the order in which a rank could run all that it has must
not matter either.

**The condition.** Let a wait *depend* on another one, of the rank that posts what it waits for, unless the post comes
before that other wait by the posting rank's own dependencies. If no waits depend on each other in a ring, no graph can
deadlock. For if the ranks are stuck, every rank that is not done has a wait that has started and waits for a post of
another rank that is stuck as well. That rank too has such a wait, and its post, which has not started, cannot have to
come before it: so the first wait depends on the second, and so on; as there are finitely many ranks, this ends in a
ring.

Conversely a ring that has one wait of each rank is a deadlock: every rank may start its wait before its post. What is
reported names the waits of a ring. All waits of a plan may come after the own signal of the same turn: then there is no
ring, because a wait depends only on waits of earlier turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from .order import Order, Problem


def graph_deadlocks(order: Order) -> Iterator[Problem]:
    """A ring of waits that depend on each other, if there is one. No stream may be stuck in the order as it is."""
    ring = _ring(_dependent(order))
    if ring:
        text = "a CUDA graph may start each of these before its rank posts what the one before it waits for"
        yield Problem("graph deadlock", tuple(order.where[number] for number in ring), text)


def _dependent(order: Order) -> dict[int, list[int]]:
    """For every step that awaits posts of other ranks, the steps that it depends on."""
    rank_of = [at.rank for at in order.where]
    place: list[int] = []  # of each step among those of its rank
    before: list[
        int
    ] = []  # for each step, the bit set of the places of those that its rank's dependencies put before it
    posts: dict[int, list[int]] = {}  # of each step that awaits some
    waits: dict[int, list[int]] = {rank: [] for rank in rank_of}  # of each rank, those steps
    counts = dict.fromkeys(rank_of, 0)
    last: dict[int, int] = {}  # of each timeline, its last step so far
    for number, rank in enumerate(rank_of):
        place.append(counts[rank])
        counts[rank] += 1
        follows = [earlier for earlier in order.follows.get(number, ()) if earlier is not None]
        own = [earlier for earlier in follows if rank_of[earlier] == rank]
        if order.timeline[number] in last:
            own.append(last[order.timeline[number]])
        last[order.timeline[number]] = number
        bits = 0
        for earlier in own:
            bits |= before[earlier] | 1 << place[earlier]
        before.append(bits)
        posts[number] = [earlier for earlier in follows if rank_of[earlier] != rank]
        if posts[number]:
            waits[rank].append(number)
    return {
        wait: [other for post in posts[wait] for other in waits[rank_of[post]] if not before[other] >> place[post] & 1]
        for members in waits.values()
        for wait in members
    }


def _ring(dependent: dict[int, list[int]]) -> list[int]:
    """A ring in a graph, by a search in depth; empty if there is none."""
    done: set[int] = set()
    for start in dependent:
        path: list[int] = []
        entered: dict[int, int] = {}  # what is on the path, and where
        ahead = [iter([start])]
        while ahead:
            number = next(ahead[-1], None)
            if number is None:
                ahead.pop()
                if path:
                    done.add(path[-1])
                    del entered[path.pop()]
            elif number in entered:
                return path[entered[number] :]
            elif number not in done:
                entered[number] = len(path)
                path.append(number)
                ahead.append(iter(dependent[number]))
    return []
