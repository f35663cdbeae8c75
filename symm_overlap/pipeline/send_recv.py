"""Put sends and receives into the integers of a schedule of compute."""

from __future__ import annotations

from .. import _sim
from . import twin
from .encoded import Encoded, integers


def encoded_send_recv(encoded: Encoded, *, compiled: bool = True) -> Encoded:
    """The schedule with a send behind each action whose result another rank needs, and the receive in that rank's row.

    The ranks are visited in rounds, in rank order. Each runs its next cell if it has the input that it needs, and then
    the send goes into its row and the receive, in the same moment, into the other's. So sends and receives of two ranks
    are in one order in both rows. An empty cell takes its turn, and is left out. This is the order of
    torch.distributed.pipelining. Two stages of one rank hand over without a send.

    Args:
        compiled: False runs the same algorithm in plain Python.

    Raises:
        ValueError: some action never gets its input.
    """
    lowered = _sim.add_send_recv(encoded) if compiled else twin.add_send_recv(encoded)
    if lowered is None:
        raise ValueError("no order of sends and receives fits: some action never gets its input; see verify(schedule)")
    if isinstance(lowered, tuple):
        cells, starts = map(integers, lowered)
    else:
        ends = [0]
        for row in lowered:
            ends.append(ends[-1] + len(row))
        cells, starts = integers([code for row in lowered for code in row]), integers(ends)
    return encoded._replace(cells=cells, starts=starts)
