"""Planner: compute the partial results for all ranks at once, then sum those that all ranks computed for this rank.

Everything is on the caller's stream. World size 3, rank 0::

    compute0  produce all, signal 1 2 | wait 2, pull 2 | wait 1, pull 1 | reduce

With ``in_place`` nothing is pulled: the sum reads the peers' memory. No communication is hidden, but the matmul is not
cut into pieces, which is faster for small problems. The sum is in rank order, as in `produce_reduce_scatter`.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Plan
from .reduction import Reduction, reducing


@lru_cache(maxsize=4096)
def produce_then_reduce_scatter(
    rank: int, world: int, *, stream: str = "compute0", in_place: bool = False, keep: bool = False
) -> Plan:
    """Return the plan of ``rank`` for ``Y = reduce_scatter(X @ B)``: one matmul, and then the exchange.

    Args:
        rank, world: the rank that runs the plan, and the world size.
        stream: the caller's stream, which runs everything.
        in_place: reduce directly from the peers' memory, without copies.
        keep: this rank's matmul, ``X @ B``, is an output too.

    Buffers, in parts of a rank: "input", "workspace" and, with ``keep``, "product" ``world``, each written or read as
    one region; "stage" ``world``, with this rank's part unused; "output" 1.

    Raises:
        ValueError: the rank is not in the world.
    """
    plan = reducing("produce_then_reduce_scatter", rank, world, 1, (stream,), stream)
    reduction = Reduction(plan, in_place, streams=(stream,), keep=keep)
    reduction.produce_at_once()
    reduction.reduce(0, [plan.here("output", 0)])
    return plan.finish(plan.here("output", 0), *([plan.here("product", 0, world)] if keep else []))
