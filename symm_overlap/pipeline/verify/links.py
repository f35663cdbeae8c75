"""Check sends and receives: each has its counterpart, and the two ranks of a link have them in the same order.

A link leads from one rank to another. Messages on it arrive in order, so the n-th receive gets the n-th send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ..action import MESSAGES, RECV_B, RECV_F, SEND_B, SEND_F, SENDS, Action
from ..schedule import Schedule
from .problem import Index, Place, Problem

_OPPOSITE = {SEND_F: RECV_F, RECV_F: SEND_F, SEND_B: RECV_B, RECV_B: SEND_B}

Link = tuple[int, int]
"""(the rank that sends, the rank that receives)."""


def counterpart(schedule: Schedule, action: Action) -> Action | None:
    """Return the receive of a send, or the send of a receive. None if no stage could have it."""
    towards_last = action.kind in (SEND_F, RECV_B)
    other = schedule.next_stage(action.stage) if towards_last else schedule.previous_stage(action.stage)
    return None if other is None else Action(other, _OPPOSITE[action.kind], action.microbatch)


def unpaired(index: Index) -> Iterator[Problem]:
    """Find sends without a receive, receives without a send, sends within a rank, and links whose two ends differ."""
    schedule = index.schedule
    links: defaultdict[Link, tuple[list[Place], list[Place]]] = defaultdict(lambda: ([], []))
    complete = True
    for places in index.places:
        for place in places:
            if place.action.kind not in MESSAGES:
                continue
            other = counterpart(schedule, place.action)
            problem = _unpaired(index, place, other)
            if problem is not None:
                complete = False
                yield problem
            elif other is not None:
                ranks = place.rank, schedule.placement[other.stage]
                sends = place.action.kind in SENDS
                links[ranks if sends else ranks[::-1]][0 if sends else 1].append(place)
    if complete:  # otherwise the ends differ just because of what is missing
        for link, (sends_of_link, recvs_of_link) in links.items():
            yield from _crossed(schedule, link, sends_of_link, recvs_of_link)


def _unpaired(index: Index, place: Place, other: Action | None) -> Problem | None:
    sends = place.action.kind in SENDS
    if other is None:
        end = "the last stage sends no output" if place.action.kind in (SEND_F, RECV_B) else "the first has no input"
        return Problem("unpaired", (place,), f"there is no stage on the other side: {end}")
    rank = index.schedule.placement[other.stage]
    if rank == place.rank:
        text = f"stage {other.stage} is on the same rank, so there must be no {'send' if sends else 'receive'}"
        return Problem("unpaired", (place,), text)
    if other not in index.of:
        missing = f"rank {rank} never {'receives' if sends else 'sends'} it: no {other}"
        return Problem("unpaired", (place,), missing)
    return None


def _crossed(schedule: Schedule, link: Link, sends: list[Place], recvs: list[Place]) -> Iterator[Problem]:
    for send, recv in zip(sends, recvs, strict=False):
        if counterpart(schedule, send.action) != recv.action:
            text = f"rank {link[0]} sends to rank {link[1]}, which receives in another order; they first differ here"
            yield Problem("crossed", (send, recv), text)
            return
