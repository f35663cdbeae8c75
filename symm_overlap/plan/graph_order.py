"""Check that no order that a CUDA graph may choose lets the ranks wait for each other for ever.

A graph keeps the order given by a plan's streams and ``after``, but not the order in which the steps were issued. It
may run independent steps at the same time. At worst it runs one step of a rank at a time, in any order that these
dependencies allow, and a step that awaits a post then blocks its whole rank. So the plans must not deadlock for any
such order on any rank.

**The condition.** Wait A *depends* on wait B if B is on the rank that posts what A waits for, unless that rank's own
dependencies put the post before B. If no waits depend on each other in a ring, no graph can deadlock. Proof: suppose
the ranks are stuck. Then every rank that is not done has a wait A that has started, and A waits for a post of another
rank that is stuck as well. That rank too has a wait B that has started. The post has not started, so the rank's
dependencies do not put it before B, and A depends on B. The same argument applies to B, and so on. As there are
finitely many ranks, this ends in a ring.

Conversely, a ring that has one wait of each rank is a deadlock, because every rank may start its wait before its post.
The problem that is reported names the waits of a ring. If every wait of a plan comes after the rank's own signal of the
same turn, there is no ring, because a wait then depends only on waits of earlier turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from .order import Order, Problem


def graph_deadlocks(order: Order) -> Iterator[Problem]:
    """Yield one ring of waits that depend on each other, if there is one. ``order`` may not have stuck streams."""
    ring = _ring(_dependent(order))
    if ring:
        text = (
            "a CUDA graph may start each of these steps before its rank posts what the step listed above it waits for; "
            "for the first step, that is the last one"
        )
        yield Problem("graph deadlock", tuple(order.where[number] for number in ring), text)


def _dependent(order: Order) -> dict[int, list[int]]:
    """Return, for every step that awaits posts of other ranks, the waits that it depends on."""
    rank_of = [at.rank for at in order.where]
    place: list[int] = []  # for each step, its index among the steps of its rank
    before: list[
        int
    ] = []  # for each step, the bit set of the places of the steps that its rank's dependencies put before it
    posts: dict[int, list[int]] = {}  # for each step, the posts of other ranks that it awaits
    waits: dict[int, list[int]] = {rank: [] for rank in rank_of}  # for each rank, its steps that await posts
    counts = dict.fromkeys(rank_of, 0)
    last: dict[int, int] = {}  # for each timeline, its last step so far
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
    """Return a cycle in the dependency graph, found by depth-first search, or an empty list if there is none."""
    done: set[int] = set()
    for start in dependent:
        path: list[int] = []
        entered: dict[int, int] = {}  # for each number on the path, its index there
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
