"""Planner: one kernel computes a partial result for every rank, and each chunk is pushed once it is computed.

World size 4, one chunk, rank 0::

    compute0  tiles 1 | tiles 2               | tiles 3               | tiles 0
    copy              | poll 1, push 1, signal | poll 2, push 2, signal | poll 3, push 3, signal
    reduce                                                  wait 1 2 3, poll 0, reduce

The steps ``tiles`` are one launch; `fused_all_gather_matmul` explains what that means, and what ``apart`` is for.
`fused_reduction` explains in which order chunks are computed, and when a peer's memory may be written.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Plan
from .fused_reduction import FusedReduction


@lru_cache(maxsize=4096)
def fused_matmul_reduce_scatter(
    rank: int,
    world: int,
    *,
    chunks: int = 1,
    stream: str = "compute0",
    copy: str = "copy",
    copies: int = 1,
    sums: str = "reduce",
    apart: bool = False,
) -> Plan:
    """Return the plan of ``rank`` for ``Y = reduce_scatter(X @ B)``.

    Args:
        rank, world: the rank that runs the plan, and the world size.
        chunks: the number of pieces into which the part of each rank is cut; each has a flag.
        stream: the caller's stream, which launches the kernel.
        copy, sums: the streams of the copies and of the sums. All streams must be different.
        copies: the number of streams of the copies, as in `CollectiveBuilder`.
        apart: see `fused_all_gather_matmul`.

    Buffers, in chunks: as in `fused_reduction.BUFFERS`; "output" ``chunks``.

    Raises:
        ValueError: an argument is out of range.
    """
    plan = FusedReduction(
        "fused_matmul_reduce_scatter", rank, world, chunks, stream, copy, sums, apart=apart, copies=copies
    )
    plan.produce()
    for piece in plan.pieces:
        plan.reduce(piece, [plan.here("output", piece)])
    return plan.finish(plan.here("output", 0, chunks))
