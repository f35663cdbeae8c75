"""Planner: a reduce-scatter of the ranks' partial results, then an all-gather of the sums.

The second exchange is like the first half of `all_gather_consume`. A reduction stores its sum where the peers can read
it, and signals them. Each peer pulls the sums of its next neighbour first. Every rank gets the same bits, because each
chunk is summed once, by its owner.

No barrier is needed between calls; see `all_gather_consume`.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Plan
from .reduction import Reduction, reducing


@lru_cache(maxsize=4096)
def produce_all_reduce(
    rank: int,
    world: int,
    *,
    chunks: int = 1,
    compute: tuple[str, ...] = ("compute0",),
    copy: str = "copy",
    copies: int = 1,
    span: int = 1,
    in_place: bool = False,
    sleep: bool = True,
) -> Plan:
    """Return the plan of ``rank`` for ``Y = all_reduce(X @ B)``.

    Arguments and errors are the same as in `produce_reduce_scatter`. With ``in_place`` the partial results are read
    directly from the peers' memory. The sums are pulled in any case, because every rank needs a copy of its own.

    Buffers, in chunks: as in `produce_reduce_scatter`, but "output" ``world * chunks``. In the end this rank's part of
    "workspace" holds its sum.
    """
    plan = reducing("produce_all_reduce", rank, world, chunks, compute, copy, copies=copies, span=span)
    reduction = Reduction(plan, in_place, streams=compute)
    reduction.produce_all(sleep)
    for piece in plan.pieces:
        reduction.reduce(piece, [plan.here("output", plan.unit(rank, piece)), reduction.reduced(rank, piece)])
        reduction.share(piece)
    for piece in plan.pieces:
        reduction.collect(piece)
    return plan.finish(plan.here("output", 0, world * chunks))
