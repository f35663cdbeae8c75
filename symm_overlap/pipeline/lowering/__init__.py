"""Lowering passes. Together they turn a schedule of compute alone into everything that a rank does.

Each pass has its own file, returns a new schedule, and takes time proportional to the number of cells of the old one.
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
    """Apply all passes that torch's runtime applies to a schedule of compute alone, in torch's order.

    Args:
        schedule: a schedule of compute alone.
        window, lookahead: see `add_unshard_reshard`.
        waits: True adds WAIT_SEND_F, WAIT_SEND_B and WAIT_REDUCE_GRAD, as torch 2.15 does. Torch 2.11 and 2.13 do not
            know these kinds.
        late_reduce_waits: with ``waits``, True waits for a reduction only before the next one or at the end of the row.
        deferred: True moves receives as late as ``transport`` allows (`defer_receives`).
        transport: see `defer_receives`.

    Returns:
        The lowered schedule.

    Raises:
        ValueError: a pass raises it; see the passes.
    """
    reduce_waits = ("late" if late_reduce_waits else "at once") if waits else "none"
    gathered = add_unshard_reshard(schedule, window, lookahead)
    lowered = add_send_recv(add_reduce_grad(gathered, reduce_waits))
    if waits:
        lowered = add_send_waits(lowered)
    return defer_receives(lowered, transport) if deferred else lowered
