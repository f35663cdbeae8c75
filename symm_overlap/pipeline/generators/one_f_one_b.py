"""1F1B: after a few forwards, one forward and one backward in turn, so that few activations are kept.

Two ranks, three microbatches::

    rank 0   0F0  .  0F1 0B0 0F2 0B1  .  0B2
    rank 1    .  1F0 1B0 1F1 1B1 1F2 1B2

The schedule is that of Narayanan et al., "PipeDream" (2019), without its stale weights. The last rank starts with the
forward of microbatch 0. In the table of torch 2.13, the last rank starts with the forward of microbatch 1, and ends
with a microbatch that does not exist.
"""

from __future__ import annotations

from ..action import FORWARD, FULL_BACKWARD, Action
from ..placement import loop
from ..schedule import Row, Schedule
from .arguments import require


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Return 1F1B: one stage a rank. Rank r keeps the activations of at most ``ranks - r`` microbatches.

    There may be fewer microbatches than ranks.

    Raises:
        TypeError, ValueError: an argument is not a positive integer.
    """
    require("1F1B", ranks=ranks, microbatches=microbatches)
    return Schedule(tuple(_row(rank, ranks, microbatches) for rank in range(ranks)), loop(ranks, ranks), microbatches)


def _row(rank: int, ranks: int, microbatches: int) -> Row:
    """Return the row of one rank: forwards to fill the ranks behind it, then pairs, then the remaining backwards."""
    forwards = [Action(rank, FORWARD, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(rank, FULL_BACKWARD, microbatch) for microbatch in range(microbatches)]
    behind = ranks - 1 - rank
    row: list[Action | None] = [*[None] * rank, *forwards[:behind], *[None] * behind]
    for forward, backward in zip(forwards[behind:], backwards, strict=False):
        row += [forward, backward]
    for backward in backwards[len(forwards[behind:]) :]:
        row += [None, backward]
    return tuple(row)
