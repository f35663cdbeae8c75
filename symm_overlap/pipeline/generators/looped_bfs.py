"""Looped BFS: every rank runs all microbatches through one of its stages before it starts with the next stage.

Two ranks, two stages a rank, two microbatches::

    rank 0   0F0 0F1 2F0 2F1  .   .  2B1 2B0 0B1 0B0
    rank 1    .  1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0

The schedule is that of Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022). With sharded parameters, each stage
is gathered once for the forwards and once for the backwards.
"""

from __future__ import annotations

from ..action import FORWARD, FULL_BACKWARD, Action
from ..placement import loop
from ..schedule import Row, Schedule
from .arguments import require


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return Looped BFS, with stages in a loop. Each rank keeps the activations of all microbatches on all its stages.

    Raises:
        TypeError, ValueError: an argument is not a positive integer.
    """
    require("LoopedBFS", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    stages = ranks * stages_per_rank
    rows = tuple(_row(rank, ranks, range(rank, stages, ranks), microbatches) for rank in range(ranks))
    return Schedule(rows, loop(ranks, stages), microbatches)


def _row(rank: int, ranks: int, stages: range, microbatches: int) -> Row:
    """Return the row of one rank. Backwards start with the last microbatch, which is ready first."""
    return (
        *[None] * rank,
        *(Action(stage, FORWARD, microbatch) for stage in stages for microbatch in range(microbatches)),
        *[None] * (2 * (ranks - 1 - rank)),
        *(
            Action(stage, FULL_BACKWARD, microbatch)
            for stage in reversed(stages)
            for microbatch in reversed(range(microbatches))
        ),
    )
