"""Planner: a reduce-scatter of what every rank computes, then an all-gather of the sums.

The second exchange is like the first half of `all_gather_consume`: a reduction leaves its sum where the peers can
read it and signals them, each of which pulls the sums of its next neighbour first. Every rank gets the same bits,
because each chunk is summed once, by its owner.

"reduced" needs no double buffer: a rank overwrites it once every peer has sent its partial sums of this call, and by
then every peer has finished the last call.
"""

from __future__ import annotations

from functools import lru_cache

from .builder import Builder
from .produce_reduce_scatter import Reduction
from .step import Plan, Region


@lru_cache(maxsize=4096)
def produce_all_reduce(
    rank: int,
    world: int,
    *,
    chunks: int = 1,
    compute: tuple[str, ...] = ("compute0",),
    copy: str = "copy",
    parity: int = 0,
    direct: bool = False,
    sleep: bool = True,
) -> Plan:
    """The plan of ``rank`` for ``Y = all_reduce(X @ B)``.

    Arguments and errors are those of `produce_reduce_scatter`. ``direct`` reduces from the peers' memory in place;
    the sums are pulled in any case, since every rank wants a copy of its own.

    Buffers, in chunks: those of `produce_reduce_scatter`, but "output" ``world * chunks``; "reduced" ``chunks``.
    """
    plan = Builder("produce_all_reduce", rank, world, chunks, compute, copy, parity, inputs=world * chunks)
    reduction = Reduction(plan, direct, lanes=compute)
    reduction.produce_all(sleep)
    lanes = []
    for piece in plan.pieces:
        lane = reduction.reduce(piece, [plan.here("output", plan.unit(rank, piece)), plan.here("reduced", piece)])
        lanes.append(lane)
        for peer in reversed(plan.peers):
            plan.add("signal", compute[lane], peer=peer, channel=2 + lane, chunk=(rank, piece), label="[reduced]")
    for piece, lane in enumerate(lanes):  # the same on every rank
        for owner in plan.peers:
            plan.add("wait", copy, peer=owner, channel=2 + lane, chunk=(owner, piece), label="[reduced]")
            source = Region("reduced", owner, piece, piece + 1)
            plan.pull((owner, piece), source, plan.here("output", plan.unit(owner, piece)))
    return plan.finish(plan.here("output", 0, world * chunks))
