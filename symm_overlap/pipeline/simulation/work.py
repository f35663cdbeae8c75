"""A schedule as work for the clock of plans: which stream runs each action, what it follows, and what it holds.

Each rank has several streams. Each stream runs its actions in the order of the rank's row:

- compute: forwards, backwards and compounds; also RESHARD and the WAIT actions, which take no time.
- send: a send follows the action that computed the message.
- receive: there is one stream for each rank that sends to this one. A receive is done when its send is done, since the
  sender writes into the memory of the receiver.
- gather: UNSHARD follows the last RESHARD before it in the row, since it may reuse the memory that this has freed.
- reduce: REDUCE_GRAD follows the last backward of its stage before it in the row.

A forward follows two actions: its receive, or the forward of the stage before if that is on the same rank; and the last
UNSHARD of its stage before it in the row. The same holds for backwards. The sends, gathers and reductions of a rank
share one copy engine, and the rank's compute is slowed down while one of them runs.
"""

from __future__ import annotations

from typing import NamedTuple

from ... import _sim
from ...plan.work import Work, doubles, integers
from .encoded import Encoded

NUMBERS_OF_KINDS = 32
"""One more than the highest number of a kind."""

STREAMS = ("compute", "send", "gather", "reduce")
"""The first streams of a rank. They are followed by one stream for the receives from each rank, in rank order."""

_NO_LOT = bytes(integers([-1]))


class Durations(NamedTuple):
    """How long actions take. The entry of kind k and stage s is at index ``k * stages + s``.

    Attributes:
        body: how long an action runs. A transfer holds the copy engine for this time.
        tail: how long it takes after the body until the stream goes on. This is the latency of a transfer.
    """

    body: memoryview[float]
    tail: memoryview[float]


def pipeline_work(
    encoded: Encoded, durations: Durations, overlap: float, slow_down: float, one_receive_stream: bool
) -> Work:
    """Return the work of a schedule. Each cell is one piece of work, whose number is the index of the cell.

    Args:
        encoded: a schedule with its sends and receives.
        durations: how long each kind of action of each stage takes.
        overlap: the duration of a compound, as a multiple of the sum of its parts.
        slow_down: the factor by which compute takes longer while its rank sends, gathers or reduces.
        one_receive_stream: True puts all receives of a rank into one stream.

    Raises:
        ValueError: there is not exactly one duration for each kind and stage.
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
