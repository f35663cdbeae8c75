"""Checking (SYMM_OVERLAP_CHECK=1): do all ranks make the same call?

Ranks that call different ops, or one op with different shapes, would wait for signals that never come. With checking
on, every call first tells the group's store what it is and reads what the others say. So does a call that this rank
refuses, for its peers may have been given other arguments. It costs every call some exchanges with the store, so it is
off by default.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from .._torch import group_store
from ..memory import Lane, current_lane, timeout_ms

REFUSALS = (TypeError, ValueError, AttributeError, LookupError, NotImplementedError)
"""What arguments that are no good raise, here or in torch."""

_thread = threading.local()  # .told: of how many calls this thread has told its peers


def checking() -> bool:
    """Whether SYMM_OVERLAP_CHECK asks for it."""
    return os.environ.get("SYMM_OVERLAP_CHECK", "0") not in ("", "0")


def check_alike(group: dist.ProcessGroup, lane: Lane, op: str, call: Callable[[], str]) -> None:
    """Compare ``call()``, which describes a call of ``op``, on all ranks of ``group``.

    Raises:
        RuntimeError: two ranks make different calls; every rank raises, and names the first two that differ.
        torch.distributed.DistBackendError: a rank made no call before the deadline.
    """
    if not checking():
        return
    mine, number = call(), 0
    try:
        number = _say(group, lane.index, mine)
        said = _hear(group, lane, number, mine)
    except BaseException as error:  # the peers' next call would be compared with this one
        lane.give_up(op, error)
        raise
    for peer in range(1, group.size()):
        if said[peer] != said[0]:
            raise RuntimeError(
                f"ranks of group {group.group_name!r} make different calls (lane {lane.index}, call {number}): "
                f"rank 0 calls {said[0]}; rank {peer} calls {said[peer]}. "
                "All ranks must call the same op with the same shapes, in the same order."
            )


@contextmanager
def telling_refusals(op: str, group: Callable[[], dist.ProcessGroup]) -> Iterator[None]:
    """Around a call: when this rank refuses its arguments, its peers learn it, and raise in the call that they make.

    Args:
        group: the call's group; raises one of `REFUSALS` when that is what is wrong.
    """
    before = _told()
    try:
        yield
    except REFUSALS as error:
        if checking() and _told() == before:  # or the peers know of this call
            with suppress(*REFUSALS, RuntimeError):  # there is no such group, or its store is no more
                if (peers := group()).size() > 1:
                    refusal = f"{op} with arguments that it refuses ({type(error).__name__}: {error})"
                    _say(peers, current_lane(), refusal)
        raise


def _told() -> int:
    told: int = getattr(_thread, "told", 0)
    return told


def _topic(group: dist.ProcessGroup, lane: int) -> str:
    return f"symm_overlap/{group.group_name}/check/{lane}"


def _say(group: dist.ProcessGroup, lane: int, mine: str) -> int:
    """Tell the peers about the next call of this rank on a lane; its number."""
    _thread.told = _told() + 1
    store, topic = group_store(group), _topic(group, lane)
    # The store itself counts the calls: a group made again under an old name must not find what the old one said.
    number = store.add(f"{topic}/count/{group.rank()}", 1)
    store.set(f"{topic}/{number}/{group.rank()}", mine)
    return number


def _hear(group: dist.ProcessGroup, lane: Lane, number: int, mine: str) -> list[str]:
    """What every rank says of its call of this number, by rank."""
    store, rank, topic = group_store(group), group.rank(), _topic(group, lane.index)
    said = []
    deadline = time.monotonic() + timeout_ms() / 1000
    for peer in range(group.size()):
        key = f"{topic}/{number}/{peer}"
        pause = 1e-4
        gone = ""
        while not store.check([key]):
            if gone or time.monotonic() > deadline:
                raise dist.DistBackendError(
                    f"rank {rank} of group {group.group_name!r} calls {mine}; "
                    f"rank {peer} {gone or f'made no call within {timeout_ms() / 1000} s'}"
                )
            gone = lane.gone(peer)  # and then the store once more: it may have called before it went
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        said.append(store.get(key).decode())
    if number > 2:  # every rank has read what was said two calls ago
        store.delete_key(f"{topic}/{number - 2}/{rank}")
    return said
