"""Passes from schedule to schedule: from actions that compute to all that a rank does. One file a pass.

A pass returns a new schedule and takes time proportional to the cells of the old one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..schedule import Schedule
from .defer import defer_receives
from .merge import merge_backward
from .reduce_grad import add_reduce_grad
from .send_recv import add_send_recv
from .send_waits import add_send_waits
from .unshard import WINDOW, add_unshard_reshard

__all__ = [
    "add_reduce_grad",
    "add_send_recv",
    "add_send_waits",
    "add_unshard_reshard",
    "defer_receives",
    "lower",
    "merge_backward",
]


def lower(
    schedule: Schedule,
    *,
    window: int = WINDOW,
    lookahead: int | Sequence[int] | None = None,
    waits: bool = False,
    late_reduce_waits: bool = False,
    deferred: bool = False,
    transport: str = "queued",
) -> Schedule:
    """All passes that torch's runtime applies to a schedule that only computes, in its order.

    Args:
        window, lookahead: see `add_unshard_reshard`.
        waits: put WAIT_SEND and WAIT_REDUCE_GRAD, as torch 2.15 does; torch 2.11 and 2.13 do not know them.
        late_reduce_waits: with ``waits``, wait for a reduction before the next one only.
        deferred, transport: receive as late as possible on a transport (`defer_receives`).

    Raises:
        ValueError: see the passes.
    """
    reduce_waits = ("late" if late_reduce_waits else "at once") if waits else "none"
    gathered = add_unshard_reshard(schedule, window, lookahead)
    lowered = add_send_recv(add_reduce_grad(gathered, reduce_waits))
    if waits:
        lowered = add_send_waits(lowered)
    return defer_receives(lowered, transport) if deferred else lowered
