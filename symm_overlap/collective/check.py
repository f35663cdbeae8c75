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
from ..memory import timeout_ms

_counts: WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = WeakKeyDictionary()
_lock = threading.Lock()


def checking() -> bool:
    """Whether SYMM_OVERLAP_CHECK asks for it."""
    return os.environ.get("SYMM_OVERLAP_CHECK", "0") not in ("", "0")


def check_alike(group: dist.ProcessGroup, lane: int, call: Callable[[], str]) -> None:
    """Compare ``call()`` on all ranks of ``group``.

    Raises:
        RuntimeError: two ranks make different calls; every rank raises, and names the first two that differ.
        torch.distributed.DistBackendError: a rank made no call before the deadline.
    """
    if not checking():
        return
    mine = call()
    with _lock:
        counts = _counts.setdefault(group, {})
        topic = f"symm_overlap/{group.group_name}/check/{lane}"
        number = counts[topic] = counts.get(topic, 0) + 1
    store, rank = group_store(group), group.rank()
    store.set(f"{topic}/{number}/{rank}", mine)
    said = {rank: mine}
    deadline = time.monotonic() + timeout_ms() / 1000
    for peer in range(group.size()):
        key = f"{topic}/{number}/{peer}"
        while peer not in said:
            if store.check([key]):
                said[peer] = store.get(key).decode()
            elif time.monotonic() > deadline:
                raise dist.DistBackendError(
                    f"rank {rank} of group {group.group_name!r} calls {mine}; "
                    f"rank {peer} made no call within {timeout_ms() / 1000} s"
                )
            else:
                time.sleep(1e-4)
    if number > 2:  # every rank has read what was said two calls ago
        store.delete_key(f"{topic}/{number - 2}/{rank}")
    for peer in range(1, group.size()):
        if said[peer] != said[0]:
            raise RuntimeError(
                f"ranks of group {group.group_name!r} make different calls (lane {lane}, call {number}): "
                f"rank 0 calls {said[0]}; rank {peer} calls {said[peer]}. "
                "All ranks must call the same op with the same shapes, in the same order."
            )
