"""Planner: compute everything at once, sum this rank's part of it, then gather the sums of all ranks.

Everything is on the caller's stream. World size 2, rank 0::

    compute0  produce all, signal 1 | wait 1, pull 1 | reduce, signal 1 | wait 1, pull 1

With ``in_place`` the sum reads the partial results directly from the peers' memory. The sums are pulled in any case,
because every rank needs a copy of its own.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Plan
from .reduction import Reduction, reducing


@lru_cache(maxsize=4096)
def produce_then_all_reduce(rank: int, world: int, *, stream: str = "compute0", in_place: bool = False) -> Plan:
    """Return the plan of ``rank`` for ``Y = all_reduce(X @ B)``: one matmul, and then the exchange.

    Arguments and errors are the same as in `produce_then_reduce_scatter`.

    Buffers, in parts of a rank: as in `produce_then_reduce_scatter`, but "output" ``world``. In the end this rank's
    part of "workspace" holds its sum.
    """
    plan = reducing("produce_then_all_reduce", rank, world, 1, (stream,), stream)
    reduction = Reduction(plan, in_place, streams=(stream,))
    reduction.produce_at_once()
    reduction.reduce(0, [plan.here("output", rank), reduction.reduced(rank, 0)])
    reduction.share(0)
    reduction.collect(0)
    return plan.finish(plan.here("output", 0, world))
