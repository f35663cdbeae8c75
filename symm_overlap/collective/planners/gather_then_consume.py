"""Planner: gather every rank's shard, then compute once with all of them.

Everything is on the caller's stream. World size 3, rank 0::

    compute0  publish 0, signal 2 1 | pull 0 | wait 1, pull 1 | wait 2, pull 2 | consume all

With ``in_place`` nothing is pulled: the one matmul reads every shard directly from its rank's memory. No communication
is hidden, but the matmul is not cut into pieces either, which is faster for small problems. No barrier is needed
between calls; see `all_gather_consume`.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Plan
from .builder import CollectiveBuilder
from .gather import Gather, gather_buffers


@lru_cache(maxsize=4096)
def gather_then_consume(
    rank: int,
    world: int,
    *,
    stream: str = "compute0",
    in_place: bool = False,
    keep: bool = False,
    consume: bool = True,
    symmetric: bool = False,
    announce_offset: bool = True,
) -> Plan:
    """Return the plan of ``rank`` for ``Y = all_gather(X) @ B``: the whole gather first, and then one matmul.

    Args:
        rank, world: the rank that runs the plan, and the world size.
        stream: the caller's stream, which runs everything.
        in_place: the matmul reads each shard directly from the peer's memory: ``reads[0:world]`` are the shards in rank
            order. It has no effect with ``keep`` or ``consume=False``, which need the copies anyway. Without it, every
            shard, including the local one, is copied into "gathered", and the matmul reads that as one region.
        keep: the gathered tensor is an output. Otherwise "gathered", if it is used at all, is scratch.
        consume: False plans an all-gather without a matmul; it needs ``keep``.
        symmetric, announce_offset: peers can read the input itself, as in `all_gather_consume`.

    Buffers, in shards: "input" and "workspace" 1; "gathered" and "output" ``world``; with ``symmetric``, "offset" 1
    instead of "workspace".

    Raises:
        ValueError: the rank is not in the world, or nothing reads the gathered shards.
    """
    if not consume and not keep:
        raise ValueError("consume=False, keep=False gathers shards that nothing reads: set keep=True")
    buffers = gather_buffers(symmetric, keep, announce_offset)
    plan = CollectiveBuilder("gather_then_consume", rank, world, 1, (stream,), stream, buffers=buffers, inputs=1)
    read_there = in_place and consume and not keep
    gather = Gather(plan, streams=(stream,), in_place=read_there, symmetric=symmetric, announce_offset=announce_offset)
    if world > 1:
        gather.publish(stream)
    if not gather.in_place:
        gather.pull_own()
        gather.pull_all()
    if consume:
        gather.consume_at_once()
    if symmetric:
        gather.release_inputs()
    outputs = [plan.here("output", 0, world)] if consume else []
    return plan.finish(*outputs, *([plan.here("gathered", 0, world)] if keep else []))
