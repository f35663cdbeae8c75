"""Checking (SYMM_OVERLAP_CHECK=1): do all ranks make the same call?

Ranks that call different ops, or one op with different shapes, would wait for signals that never come. With checking
on, every call first tells the group's store what it is and reads what the others say. Costs some 100 us a call; off by
default.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .._torch import group_store
from ..memory import Lane, timeout_ms

_counts: WeakKeyDictionary[dist.ProcessGroup, dict[int, int]] = WeakKeyDictionary()
_lock = threading.Lock()


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
    mine = call()
    with _lock:
        counts = _counts.setdefault(group, {})
        number = counts[lane.index] = counts.get(lane.index, 0) + 1
    try:
        said = _exchange(group, lane, number, mine)
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


def _exchange(group: dist.ProcessGroup, lane: Lane, number: int, mine: str) -> list[str]:
    """What every rank says of its call of this number, by rank."""
    store, rank, topic = group_store(group), group.rank(), f"symm_overlap/{group.group_name}/check/{lane.index}"
    store.set(f"{topic}/{number}/{rank}", mine)
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
