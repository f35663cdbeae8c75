"""Planner: compute everything at once; then every rank sums the whole tensor.

Everything is on the caller's stream. World size 3, rank 0::

    compute0  produce all, signal 1 2 | wait 2, pull 2 | wait 1, pull 1 | reduce

Ranks synchronise once. In `produce_then_all_reduce` they synchronise twice, but each rank sums only its part. Which of
the two is faster depends on the size. Every rank gets the same bits, because all ranks sum in rank order. With
``in_place`` nothing is pulled: the sum reads the peers' memory.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Life, Plan, Region
from .builder import CollectiveBuilder
from .kinds import PRODUCE, REDUCE


@lru_cache(maxsize=4096)
def one_shot_all_reduce(rank: int, world: int, *, stream: str = "compute0", in_place: bool = False) -> Plan:
    """Return the plan of ``rank`` for a small ``Y = all_reduce(X @ B)``.

    Arguments and errors are the same as in `produce_then_reduce_scatter`.

    Buffers, in units of the whole tensor: "input", "workspace" and "output" 1; "stage" ``world``, with this rank's unit
    unused.
    """
    buffers = {"input": Life.INPUT, "workspace": Life.CALL, "stage": Life.SCRATCH, "output": Life.OUTPUT}
    plan = CollectiveBuilder("one_shot_all_reduce", rank, world, 1, (stream,), stream, buffers=buffers, inputs=1)
    plan.add(PRODUCE, stream, reads=[plan.here("input", 0)], writes=[plan.here("workspace", 0)])
    plan.signal(stream, plan.peers, 0, chunk=(rank, 0), label="[partial]")
    partials = {rank: plan.here("workspace", 0)}
    if in_place:
        plan.wait(stream, plan.peers[::-1], 0, chunk=(rank, 0), label="[partial]")  # in order of arrival
    for peer in reversed(plan.peers):
        partials[peer] = Region("workspace", peer, 0, 1)
        if not in_place:
            plan.wait(stream, [peer], 0, chunk=(peer, 0), label="[partial]")
            plan.pull((peer, 0), plan.here("stage", peer), partials[peer])
            partials[peer] = plan.here("stage", peer)
    output = plan.here("output", 0)
    plan.add(REDUCE, stream, reads=[partials[producer] for producer in range(world)], writes=[output])
    return plan.finish(output)
