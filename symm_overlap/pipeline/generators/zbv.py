"""ZBV: two stages a rank in a V, with split backwards. There is no idle time if F, I and W take equally long.

Two ranks, three microbatches::

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 ...
    rank 1    .  1F0 2F0 1F1 2F1 2I0 2W0 ...

The first and the last stage are on one rank, so the loss is computed on the rank that has the input. Every rank keeps
at most ``2 * ranks`` activations of its stages. This is as much memory as rank 0 needs in 1F1B, where stages are twice
as large. The schedule is that of Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 6.
"""

from __future__ import annotations

from ..placement import v
from ..schedule import Row, Schedule
from .arguments import require, require_two_stages
from .two_chunks import RowOfTwo


def zbv(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return ZBV: two stages a rank, in a V. With fewer than ``2 * ranks - 1`` microbatches, the rows have empty cells.

    Raises:
        TypeError, ValueError: an argument is not a positive integer, or ``stages_per_rank`` is not 2.
    """
    require("ZBVZeroBubble", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    require_two_stages("ZBVZeroBubble", stages_per_rank)
    rows = tuple(_row(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule(rows, v(ranks, 2 * ranks), microbatches)


def _row(rank: int, ranks: int, microbatches: int) -> Row:
    """Return the row of one rank.

    The row is built for enough microbatches to fill the pipeline. `finish` then empties the cells of those that do not
    exist.
    """
    count = max(2 * ranks - 1, microbatches)
    row = RowOfTwo((rank, 2 * ranks - 1 - rank))
    row.row += [None] * rank
    row.add(*["F0"] * (2 * (ranks - rank) - 1))
    row.add(*["F1", "F0"] * rank)
    row.add(*["F1", "I1", "W1"] * (ranks - rank))
    while row.count("F", 1) < row.count("F", 0) or row.count("F", 0) < count:
        if row.count("F", 0) < count:
            row.add("F0")
        row.add("I0", "W0", "F1", "I1", "W1")
    row.add(*["I0", "I1"] * rank)
    row.add(*["I0", "W0"] * (ranks - rank))
    row.add(*["W1"] * (count - row.count("W", 1)))
    row.add(*["W0"] * (count - row.count("W", 0)))
    return row.finish(microbatches)
