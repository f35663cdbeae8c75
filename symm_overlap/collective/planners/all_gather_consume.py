"""Planner: gather every rank's shard, and compute with each chunk as it arrives.

Every rank publishes its shard and signals its peers, which fetch it. Each rank starts to fetch from its next neighbour,
so that no two ranks fetch from the same rank at a time. A rank consumes its own shard first, straight from the input.
Meanwhile the shard of the next rank arrives.

World size 4, one chunk a shard, rank 0::

    copy      publish 0, signal 3 2 1 | wait 1, pull 1 | wait 2, pull 2 | wait 3, pull 3 |
    compute0  sleep | consume 0                        | consume 1      | consume 2      | consume 3

The steps are in the order in which one host thread issues them: publishing and one signal for all peers, the matmul
with the local shard, and then each wait and copy one chunk ahead of the matmul that needs it.

**No barrier between calls.** The workspace is double buffered. In each call a rank signals every peer, after its own
previous call has joined, and waits for every peer. When a rank starts call k+2, which overwrites the workspace of call
k, it has received every peer's signal of call k+1. So every peer has finished call k. This holds for any mix of ops on
one workspace.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Plan
from .builder import CollectiveBuilder
from .gather import Gather, gather_buffers


@lru_cache(maxsize=4096)
def all_gather_consume(
    rank: int,
    world: int,
    *,
    chunks: int = 1,
    compute: tuple[str, ...] = ("compute0",),
    copy: str = "copy",
    copies: int = 1,
    span: int = 1,
    in_place: bool = False,
    keep: bool = False,
    consume: bool = True,
    accumulate: bool = False,
    symmetric: bool = False,
    announce_offset: bool = True,
    outbound: str | None = None,
    sleep: bool = True,
    ring: int | None = None,
) -> Plan:
    """Return the plan of ``rank`` for ``Y = all_gather(X) @ B``.

    Args:
        rank, world: the rank that runs the plan, and the world size.
        chunks: the number of pieces into which a shard is cut.
        compute: one or two streams that consume chunks, in turn; the first is the caller's.
        copy: the stream of the copies. If it is ``compute[0]``, the copies are on the caller's stream, so that one
            thread can run the plan.
        copies, span: the number of streams of the copies, and how many peers' shards one matmul covers at most, as in
            `CollectiveBuilder`.
        in_place: consume chunks directly from the peer's memory. It has no effect with ``keep``, which needs the copy
            anyway, and with a ``span`` of more than 1, for which shards must be next to each other in memory.
        keep: the gathered tensor is an output. Otherwise "gathered", if it is used at all, is scratch.
        consume: False plans an all-gather without a matmul; it needs ``keep``.
        accumulate: every chunk adds to the one output (gather along the contracted dimension) instead of writing its
            part.
        symmetric: peers can read the input itself, which may begin at a different offset on each rank, so nothing is
            published. A rank announces in "offset" where its shard begins. Steps that read a peer's input also read
            its "offset", as the second of their ``reads``. The join waits until all peers have read this rank's input.
        announce_offset: False if a symmetric input begins at the same offset on every rank, so that no rank has to
            announce it. This is for back ends whose host cannot read what a peer announces.
        outbound: the stream that publishes and signals, ``copy`` or ``compute[0]``. On ``copy``, the default, both
            overlap the matmul with the local shard. If signals are kernels, that matmul could delay them, and with
            them every other rank; on ``compute[0]`` they come ahead of it. By default a symmetric input is announced
            on the stream that reads the peers' inputs.
        sleep: if ``outbound`` is not ``compute[0]``, delay the matmul with the local shard for a moment, so that
            publishing is scheduled ahead of it.
        ring: the number of chunks that "gathered" has room for, if chunks are pulled and not kept. A chunk is pulled
            once the chunk that was in its place is consumed. Use it for shards that together need too much memory.

    Buffers, in chunks: "input" and "workspace" ``chunks``; "gathered" ``world * chunks``, ordered by rank, or ``ring``;
    "output" ``world * chunks``, or 1 with ``accumulate``; with ``symmetric``, "offset" 1 instead of "workspace".

    Raises:
        ValueError: an argument is out of range.
    """
    buffers = gather_buffers(symmetric, keep, announce_offset)
    plan = CollectiveBuilder(
        "all_gather_consume",
        rank,
        world,
        chunks,
        compute,
        copy,
        buffers=buffers,
        inputs=chunks,
        copies=copies,
        span=span,
    )
    if not consume and not keep:
        raise ValueError("consume=False, keep=False gathers shards that nothing reads: set keep=True")
    if span > 1 and (accumulate or ring is not None):
        raise ValueError(f"span is {span}: with accumulate or ring, a matmul covers 1 shard")
    if ring is not None and ring < 1:
        raise ValueError(f"ring is {ring}: there must be room for at least 1 chunk")
    gather = Gather(
        plan,
        streams=compute[:1] if accumulate else compute,  # sums into one output cannot overlap
        in_place=in_place and consume and not keep and span == 1,
        symmetric=symmetric,
        ring=None if keep or in_place else ring,
        announce_offset=announce_offset,
    )
    outbound = outbound or (gather.reading if symmetric else copy)
    if outbound not in (copy, compute[0]):
        raise ValueError(f"outbound is {outbound!r}: name the copy stream, {copy!r}, or the caller's, {compute[0]!r}")
    if world > 1:
        gather.publish(outbound)
    if consume:
        if sleep and world > 1 and outbound != compute[0]:
            for stream in gather.streams[:chunks]:
                plan.add("sleep", stream)
        gather.consume_all(accumulate)
    else:
        gather.pull_all()
    if keep:  # the only reason to copy the local shard
        gather.pull_own()
    if symmetric:
        gather.release_inputs()
    outputs = [plan.here("output", 0, 1 if accumulate else world * chunks)] if consume else []
    return plan.finish(*outputs, *([plan.here("gathered", 0, world * chunks)] if keep else []))
