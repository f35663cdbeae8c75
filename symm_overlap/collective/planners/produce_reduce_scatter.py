"""Planner: compute a partial result for every rank, and sum what all ranks computed for this one.

The chunks of rank+1 are produced first and the own ones last, so that every chunk but the own travels behind a
matmul. Two compute streams take turns, the last one first: the caller's stream sleeps for a moment ahead of its first
chunk, so that every rank starts in the same order and none waits for another at each step. World size 4, one chunk,
rank 0::

    compute1  produce 1, signal 1 |                              | produce 3, signal 3 |
    compute0  sleep               | produce 2, signal 2          |                     | produce 0 | reduce
    copy                          | wait 3, pull 3               | wait 2, pull 2      | wait 1, pull 1

The sum is always in rank order, so each run gives the same bits. A reduction waits for peers, so none comes ahead of
a matmul. No barrier is needed between calls: `all_gather_consume` says why.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Plan
from .builder import CollectiveBuilder
from .reduction import Reduction, reduction_buffers


@lru_cache(maxsize=4096)
def produce_reduce_scatter(
    rank: int,
    world: int,
    *,
    chunks: int = 1,
    compute: tuple[str, ...] = ("compute0",),
    copy: str = "copy",
    in_place: bool = False,
    sleep: bool = True,
    keep: bool = False,
    own: bool = False,
) -> Plan:
    """The plan of ``rank`` for ``Y = reduce_scatter(X @ B)``.

    Args:
        chunks: pieces the part of each rank is cut into.
        compute: one or two streams that produce chunks, in turn; the first is the caller's.
        copy: the stream of the copies; ``compute[0]`` puts them on the caller's stream, so that one thread can run
            the plan.
        in_place: reduce straight from the peers' memory, without copies.
        sleep: with two compute streams, make the last one start first on every rank.
        keep: what this rank computes, ``X @ B``, is an output too: each chunk is written there by the step that
            produces it.
        own: with ``keep``, the own chunks are made in the product alone, and the sum reads them there.

    Buffers, in chunks: "input", "workspace" and, with ``keep``, "product" ``world * chunks``, ordered by the rank a
    chunk is for; "stage" ``world * chunks``, ordered by the rank a chunk is from, the own part unused; "output"
    ``chunks``.

    Raises:
        ValueError: an argument is out of range.
    """
    plan = CollectiveBuilder(
        "produce_reduce_scatter", rank, world, chunks, compute, copy, buffers=reduction_buffers(), inputs=world * chunks
    )
    reduction = Reduction(plan, in_place, streams=compute, keep=keep, own=own)
    reduction.produce_all(sleep)
    for piece in plan.pieces:
        reduction.reduce(piece, [plan.here("output", piece)])
    kept = [plan.here("product", 0, world * chunks)] if keep else []
    return plan.finish(plan.here("output", 0, chunks), *kept)
