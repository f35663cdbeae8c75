"""Planner: compute a partial result for every rank, and sum the results that all ranks computed for this rank.

The chunks for rank+1 are produced first and this rank's own chunks last, so that every chunk but its own travels while
a matmul runs. Two compute streams take turns, and the second one starts: the caller's stream sleeps for a moment before
its first chunk, so that all ranks start in the same order. Otherwise ranks would wait for each other at every step.

World size 4, one chunk, rank 0::

    compute1  produce 1, signal 1 |                              | produce 3, signal 3 |
    compute0  sleep               | produce 2, signal 2          |                     | produce 0 | reduce
    copy                          | wait 3, pull 3               | wait 2, pull 2      | wait 1, pull 1

The sum is always in rank order, so each run gives the same bits. A reduction waits for peers, so all matmuls are issued
before the first reduction. No barrier is needed between calls; see `all_gather_consume`.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Plan
from .reduction import Reduction, reducing


@lru_cache(maxsize=4096)
def produce_reduce_scatter(
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
    keep: bool = False,
    own: bool = False,
) -> Plan:
    """Return the plan of ``rank`` for ``Y = reduce_scatter(X @ B)``.

    Args:
        rank, world: the rank that runs the plan, and the world size.
        chunks: the number of pieces into which the part of each rank is cut.
        compute: one or two streams that produce chunks, in turn; the first is the caller's.
        copy: the stream of the copies. If it is ``compute[0]``, the copies are on the caller's stream, so that one
            thread can run the plan.
        copies, span: the number of streams of the copies, and how many peers' parts one matmul covers at most, as in
            `CollectiveBuilder`.
        in_place: reduce directly from the peers' memory, without copies.
        sleep: with two compute streams, make the second one start first on every rank.
        keep: this rank's matmul, ``X @ B``, is an output too ("product"). The step that produces a chunk also writes it
            there.
        own: with ``keep``, this rank's own chunks are written only to "product", and the sum reads them there.

    Buffers, in chunks: "input", "workspace" and, with ``keep``, "product" ``world * chunks``, ordered by the rank a
    chunk is for; "stage" ``world * chunks``, ordered by the rank a chunk is from, with this rank's part unused;
    "output" ``chunks``.

    Raises:
        ValueError: an argument is out of range.
    """
    if keep and span > 1:
        raise ValueError(f"span is {span}: with keep, a matmul covers 1 part")
    plan = reducing("produce_reduce_scatter", rank, world, chunks, compute, copy, copies=copies, span=span)
    reduction = Reduction(plan, in_place, streams=compute, keep=keep, own=own)
    reduction.produce_all(sleep)
    for piece in plan.pieces:
        reduction.reduce(piece, [plan.here("output", piece)])
    kept = [plan.here("product", 0, world * chunks)] if keep else []
    return plan.finish(plan.here("output", 0, chunks), *kept)
