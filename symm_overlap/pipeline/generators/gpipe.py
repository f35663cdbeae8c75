"""GPipe: all forwards, then all backwards.

Two ranks, three microbatches::

    rank 0   0F0 0F1 0F2  .   .  0B0 0B1 0B2
    rank 1    .  1F0 1F1 1F2 1B0 1B1 1B2

The schedule is that of Huang et al., "GPipe" (2019).
"""

from __future__ import annotations

from ..action import FORWARD, FULL_BACKWARD, Action
from ..placement import loop
from ..schedule import Row, Schedule
from .arguments import require


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Return GPipe: one stage a rank. Each rank keeps the activations of all microbatches.

    Raises:
        TypeError, ValueError: an argument is not a positive integer.
    """
    require("GPipe", ranks=ranks, microbatches=microbatches)
    return Schedule(tuple(_row(rank, ranks, microbatches) for rank in range(ranks)), loop(ranks, ranks), microbatches)


def _row(rank: int, ranks: int, microbatches: int) -> Row:
    """Return the row of one rank. It waits for the first forward, and for the first gradient from the last rank."""
    return (
        *[None] * rank,
        *(Action(rank, FORWARD, microbatch) for microbatch in range(microbatches)),
        *[None] * (2 * (ranks - 1 - rank)),
        *(Action(rank, FULL_BACKWARD, microbatch) for microbatch in range(microbatches)),
    )
