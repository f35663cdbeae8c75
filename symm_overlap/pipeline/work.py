"""A schedule as work for the clock of plans: which stream runs each action, what it follows, what it holds.

Each rank has streams, each of which runs its actions in the order of the rank's row:

- compute: forwards, backwards, compounds; RESHARD and the WAIT actions, which take no time;
- send: a send follows the action that made what it sends;
- receive, one for each rank that sends to this one: a receive is done when its send is, since the sender writes into
  the memory of the receiver;
- gather: UNSHARD. It follows the last RESHARD before it in the row, whose memory it may take over;
- reduce: REDUCE_GRAD, which follows the last backward of its stage before it in the row.

A forward follows its receive, or the forward of the stage before on the same rank, and the last UNSHARD of its stage
before it in the row; backwards likewise. Sends, gathers and reductions of a rank share one copy engine, and the rank's
compute is slowed down while one of them runs.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import _sim
from ..plan.work import Work, doubles, integers
from .encoded import Encoded

NUMBERS_OF_KINDS = 32
"""One more than the highest number of a kind."""

STREAMS = ("compute", "send", "gather", "reduce")
"""The streams of a rank, behind which it has one for the receives from each rank, in rank order."""

_NO_LOT = bytes(integers([-1]))


class Durations(NamedTuple):
    """How long actions take: kind k of stage s has its own at ``k * stages + s``.

    Attributes:
        body: how long an action runs, and a transfer holds the copy engine.
        tail: how long it takes after that until its stream goes on: the latency of a transfer.
    """

    body: memoryview[float]
    tail: memoryview[float]


def pipeline_work(
    encoded: Encoded, durations: Durations, overlap: float, slow_down: float, one_receive_stream: bool
) -> Work:
    """The work of a schedule that has its sends and receives; each cell is one piece, with its index as number.

    Args:
        overlap: a compound takes so many times the bodies of its parts.
        slow_down: compute takes so many times as long while its rank sends, gathers or reduces.
        one_receive_stream: all receives of a rank are in one stream.

    Raises:
        ValueError: there are not as many durations as kinds and stages.
    """
    stream, after_starts, after, holds_starts, holds, body, tail, loads, slowed = _sim.pipeline_work(
        encoded, durations, overlap, one_receive_stream
    )
    return Work(
        stream=memoryview(stream).cast("q"),
        after_starts=memoryview(after_starts).cast("q"),
        after=memoryview(after).cast("q"),
        holds_starts=memoryview(holds_starts).cast("q"),
        holds=memoryview(holds).cast("q"),
        body=memoryview(body).cast("d"),
        tail=memoryview(tail).cast("d"),
        lottery=memoryview(_NO_LOT * len(encoded.cells)).cast("q"),
        lot_starts=integers([0]),
        lots=doubles(()),
        loads=memoryview(loads).cast("q"),
        slowed=memoryview(slowed).cast("q"),
        slow_down=doubles([slow_down] * encoded.ranks),
    )
