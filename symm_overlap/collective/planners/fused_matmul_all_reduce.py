"""Planner: like `fused_matmul_reduce_scatter`, and then every rank fetches the sums of all others.

World size 3, one chunk, rank 0::

    compute0  tiles 1 | tiles 2               | tiles 0
    copy              | poll 1, push 1, signal | poll 2, push 2, signal          | wait 1 2, pull 1, pull 2
    reduce                                   wait 1 2, poll 0, reduce, signal 2 1

A sum is written to the output, and also to this rank's part of "workspace", where the peers can read it and to which no
rank pushes. Every rank gets the same bits, because each chunk is summed once, by its owner.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Plan, Region
from .fused_reduction import FusedReduction


@lru_cache(maxsize=4096)
def fused_matmul_all_reduce(
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
    """Return the plan of ``rank`` for ``Y = all_reduce(X @ B)``.

    Arguments and errors are the same as in `fused_matmul_reduce_scatter`.

    Buffers, in chunks: as in `fused_reduction.BUFFERS`; "output" ``world * chunks``. This rank's part of "workspace" is
    for its sum.
    """
    plan = FusedReduction(
        "fused_matmul_all_reduce", rank, world, chunks, stream, copy, sums, apart=apart, copies=copies
    )
    plan.produce()
    shared = []
    for piece in plan.pieces:
        unit = plan.unit(rank, piece)
        plan.reduce(piece, [plan.here("output", unit), plan.here("workspace", unit)])
        shared.append(plan.share(piece))
    for piece in plan.pieces:
        waits = plan.wait(copy, plan.peers, 1, after=shared[piece], chunk=(rank, piece), label="[reduced]")
        for owner in plan.peers:
            unit = plan.unit(owner, piece)
            plan.pull(
                (owner, piece), plan.here("output", unit), Region("workspace", owner, unit, unit + 1), after=waits
            )
    return plan.finish(plan.here("output", 0, world * chunks))
