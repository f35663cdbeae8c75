"""Planner: a reduce-scatter of what every rank computes, then an all-gather of the sums.

The second exchange is like the first half of `all_gather_consume`: a reduction leaves its sum where the peers can
read it and signals them, each of which pulls the sums of its next neighbour first. Every rank gets the same bits,
because each chunk is summed once, by its owner.

No barrier is needed between calls: `all_gather_consume` says why.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Plan
from .builder import CollectiveBuilder
from .reduction import Reduction, reduction_buffers


@lru_cache(maxsize=4096)
def produce_all_reduce(
    rank: int,
    world: int,
    *,
    chunks: int = 1,
    compute: tuple[str, ...] = ("compute0",),
    copy: str = "copy",
    in_place: bool = False,
    sleep: bool = True,
) -> Plan:
    """The plan of ``rank`` for ``Y = all_reduce(X @ B)``.

    Arguments and errors are those of `produce_reduce_scatter`. ``in_place`` reduces from the peers' memory in place;
    the sums are pulled in any case, since every rank wants a copy of its own.

    Buffers, in chunks: those of `produce_reduce_scatter`, but "output" ``world * chunks``. The
    own part of "workspace" ends as the sum.
    """
    plan = CollectiveBuilder(
        "produce_all_reduce", rank, world, chunks, compute, copy, buffers=reduction_buffers(), inputs=world * chunks
    )
    reduction = Reduction(plan, in_place, streams=compute)
    reduction.produce_all(sleep)
    turns = []
    for piece in plan.pieces:
        turn = reduction.reduce(piece, [plan.here("output", plan.unit(rank, piece)), reduction.reduced(rank, piece)])
        turns.append(turn)
        reduction.share(piece, turn)
    for piece, turn in enumerate(turns):  # the same on every rank
        reduction.collect(piece, turn)
    return plan.finish(plan.here("output", 0, world * chunks))
