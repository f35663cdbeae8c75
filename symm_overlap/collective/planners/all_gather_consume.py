"""Planner: gather every rank's shard, and compute with each chunk as it arrives.

Every rank publishes its shard and signals; its peers fetch it, each starting with its next neighbour, so that no two
ranks fetch from the same one at a time. The own shard is consumed first, straight from the input: meanwhile the next
one comes.
World size 4, one chunk a shard, rank 0::

    copy      publish 0, signal 3 2 1 | wait 1, pull 1 | wait 2, pull 2 | wait 3, pull 3 |
    compute0  sleep | consume 0                        | consume 1      | consume 2      | consume 3

The steps stand in the order in which one host thread issues them: publishing and one signal for all peers, the own
shard's matmul, and then each wait and copy one chunk ahead of the matmul that needs it.

**No barrier between calls.** The workspace is double buffered. In each call a rank signals every peer, after its own
previous call has joined, and waits for every peer. So when a rank starts call k+2, which overwrites the workspace of
call k, it has every peer's signal of call k+1; hence every peer has finished call k. This holds for any mix of ops on
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
    in_place: bool = False,
    keep: bool = False,
    consume: bool = True,
    accumulate: bool = False,
    symmetric: bool = False,
    announce: bool = True,
    outbound: str | None = None,
    sleep: bool = True,
    ring: int | None = None,
) -> Plan:
    """The plan of ``rank`` for ``Y = all_gather(X) @ B``.

    Args:
        chunks: pieces a shard is cut into.
        compute: one or two streams that consume chunks, in turn; the first is the caller's.
        copy: the stream of the copies; ``compute[0]`` puts them on the caller's stream, so that one thread can run
            the plan.
        in_place: consume chunks where they lie, in the peer's memory. Without effect where ``keep`` wants the copy
            anyway.
        keep: the gathered tensor is an output. Otherwise "gathered", where used at all, is scratch.
        consume: False plans an all-gather without a matmul; it needs ``keep``.
        accumulate: every chunk adds to the one output (gather along the contracted dimension) instead of writing its
            part.
        symmetric: peers can read the input itself, which may lie elsewhere on each rank: nothing is published. A rank
            announces in "offset" where its shard begins, whoever reads a peer's input reads that too, as the second of
            its ``reads``, and the join waits until all peers have read this rank's input.
        announce: False where a symmetric input lies at the same place on every rank, for ranks that cannot tell.
        outbound: the stream that publishes and signals, ``copy`` or ``compute[0]``. On ``copy``, the default, both
            overlap the own shard's matmul. Where signals are kernels, that matmul could delay them, and with them every
            other rank: on ``compute[0]`` they come ahead of it. A symmetric input is announced, by default, on the
            stream that reads the peers' inputs.
        sleep: if ``outbound`` is not ``compute[0]``, delay the own shard's matmul for a moment, so that publishing is
            scheduled ahead of it.
        ring: where chunks are pulled and not kept, "gathered" has room for so many only, and a chunk is pulled once
            the one in its place is consumed: for shards that together would take too much memory.

    Buffers, in chunks: "input" and "workspace" ``chunks``; "gathered" ``world * chunks``, ordered by rank, or ``ring``;
    "output" ``world * chunks``, or 1 with ``accumulate``; with ``symmetric``, "offset" 1 instead of "workspace".

    Raises:
        ValueError: an argument is out of range.
    """
    buffers = gather_buffers(symmetric, keep, announce)
    plan = CollectiveBuilder("all_gather_consume", rank, world, chunks, compute, copy, buffers=buffers, inputs=chunks)
    if not consume and not keep:
        raise ValueError("consume=False, keep=False gathers what nobody reads: set keep=True")
    if ring is not None and ring < 1:
        raise ValueError(f"ring is {ring}: there must be room for at least 1 chunk")
    gather = Gather(
        plan,
        streams=compute[:1] if accumulate else compute,  # sums into one output cannot overlap
        in_place=in_place and consume and not keep,
        symmetric=symmetric,
        ring=None if keep or in_place else ring,
        announce=announce,
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
    if keep:  # the only reason to copy the own shard
        gather.pull_own()
    if symmetric:
        gather.release_inputs()
    outputs = [plan.here("output", 0, 1 if accumulate else world * chunks)] if consume else []
    return plan.finish(*outputs, *([plan.here("gathered", 0, world * chunks)] if keep else []))
