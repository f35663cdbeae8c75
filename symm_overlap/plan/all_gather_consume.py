"""Planner: gather every rank's shard, and compute with each chunk as it arrives.

Every rank publishes its shard and signals; its peers fetch it, each starting with its next neighbour, so that no two
ranks fetch from the same one at a time. The own shard is consumed first, straight from the input: meanwhile the next
one comes.
World size 4, one chunk a shard, rank 0::

    copy      publish 0, signal 3 2 1 | wait 1, pull 1 | wait 2, pull 2 | wait 3, pull 3 |
    compute0  sleep | consume 0                        | consume 1      | consume 2      | consume 3

**No barrier between calls.** The workspace is double buffered. In each call a rank signals every peer, after its own
previous call has joined, and waits for every peer. So when a rank starts call k+2, which overwrites the workspace of
call k, it has every peer's signal of call k+1; hence every peer has finished call k. This holds for any mix of ops on
one workspace.
"""

from __future__ import annotations

from functools import lru_cache

from .builder import Builder
from .step import Plan, Region


@lru_cache(maxsize=4096)
def all_gather_consume(
    rank: int,
    world: int,
    *,
    chunks: int = 1,
    compute: tuple[str, ...] = ("compute0",),
    copy: str = "copy",
    parity: int = 0,
    direct: bool = False,
    keep: bool = False,
    consume: bool = True,
    accumulate: bool = False,
    symmetric: bool = False,
    outbound: str | None = None,
    sleep: bool = True,
) -> Plan:
    """The plan of ``rank`` for ``Y = all_gather(X) @ B``.

    Args:
        chunks: pieces a shard is cut into.
        compute: one or two streams that consume chunks, in turn; the first is the caller's.
        copy: the stream of the copies; ``compute[0]`` puts them on the caller's stream, so that one thread can run
            the plan.
        parity: number of the call on this workspace, modulo 2.
        direct: consume chunks where they lie, in the peer's memory. Without effect where ``keep`` wants the copy
            anyway.
        keep: the gathered tensor is an output. Otherwise "gathered", where used at all, is scratch.
        consume: False plans an all-gather without a matmul; it needs ``keep``.
        accumulate: every chunk adds to the one output (gather along the contracted dimension) instead of writing its
            part.
        symmetric: peers can read the input itself: nothing is published, and the join waits until all have read.
        outbound: the stream that publishes and signals, ``copy`` or ``compute[0]``. By default it is ``copy``, where
            both overlap the own shard's matmul. Where signals are kernels that matmul could hold them up, and all
            ranks with them; on ``compute[0]`` they come first.
        sleep: with ``outbound`` on a stream of its own, hold back the own shard's matmul for a moment, so that
            publishing is scheduled ahead of it.

    Buffers, in chunks: "input" and "workspace{parity}" ``chunks``; "gathered" ``world * chunks``, ordered by rank;
    "output" ``world * chunks``, or 1 with ``accumulate``.

    Raises:
        ValueError: an argument is out of range.
    """
    plan = Builder("all_gather_consume", rank, world, chunks, compute, copy, parity, inputs=chunks)
    if not consume and not keep:
        raise ValueError("consume=False, keep=False gathers what nobody reads: set keep=True")
    lanes = compute[:1] if accumulate else compute  # sums into one output cannot overlap
    in_place = direct and consume and not keep
    shared = "input" if symmetric else plan.workspace
    meeting = compute[0] if in_place else copy  # where peers are told that their input is read
    outbound = outbound or (meeting if symmetric else copy)
    if outbound not in (copy, compute[0]):
        raise ValueError(f"outbound is {outbound!r}: name the copy stream, {copy!r}, or the caller's, {compute[0]!r}")
    # The whole symmetric input is ready at once, so one signal a channel will do.
    signals = chunks if not symmetric else min(chunks, len(lanes)) if in_place else 1

    def lane(reader: int, source: int, piece: int) -> int:
        """Which compute stream of ``reader`` consumes this chunk: both ends of a signal must agree on it."""
        return plan.unit((source - reader) % world, piece) % len(lanes)

    def ready_channel(reader: int, source: int, piece: int) -> int:
        return lane(reader, source, piece) if in_place else 0

    for piece in plan.pieces if world > 1 else ():
        if not symmetric:
            source, target = plan.here("input", piece), plan.here(shared, piece)
            plan.add("publish", outbound, reads=[source], writes=[target], chunk=(rank, piece))
        for peer in reversed(plan.peers) if piece < signals else ():
            channel = ready_channel(peer, rank, piece)
            plan.add("signal", outbound, peer=peer, channel=channel, chunk=(rank, piece), label="[ready]")

    pulls: dict[tuple[int, int], int] = {}

    def locate(stream: str, owner: int, piece: int) -> tuple[Region, list[int]]:
        """Where ``stream`` finds a chunk, and the step it must follow to find it there."""
        if owner == rank:
            return plan.here("input", piece), []
        if (owner, piece) not in pulls:
            if piece < signals:
                channel = ready_channel(rank, owner, piece)
                plan.add("wait", stream, peer=owner, channel=channel, chunk=(owner, piece), label="[ready]")
            source = Region(shared, owner, piece, piece + 1)
            if in_place:
                return source, []
            pulls[owner, piece] = plan.pull((owner, piece), source, plan.here("gathered", plan.unit(owner, piece)))
        return plan.here("gathered", plan.unit(owner, piece)), [pulls[owner, piece]]

    # The copy stream's work is enqueued ahead of the matmuls, which could fill the device. On a shared stream,
    # though, the own shard comes before the first wait.
    if not in_place and not (plan.merged and consume):
        for owner in plan.peers:
            for piece in plan.pieces:
                locate(copy, owner, piece)
    for stream in lanes[:chunks] if sleep and consume and world > 1 and outbound != compute[0] else ():
        plan.add("sleep", stream)

    consumed: list[int] = []
    for owner in [rank, *plan.peers] if consume else ():
        for piece in plan.pieces:
            stream = lanes[lane(rank, owner, piece)]
            where, after = locate(copy if not in_place else stream, owner, piece)
            output = plan.here("output", 0 if accumulate else plan.unit(owner, piece))
            reads = [where, output] if accumulate and consumed else [where]
            step = plan.add("consume", stream, reads=reads, writes=[output], after=after, chunk=(owner, piece))
            consumed.append(step)

    for piece in plan.pieces if keep else ():  # the only reason to copy the own shard
        plan.pull((rank, piece), plan.here("input", piece), plan.here("gathered", plan.unit(rank, piece)))
    if symmetric:  # the input is the caller's again only when every peer has read it
        for peer in plan.peers:
            plan.add("signal", meeting, after=consumed if in_place else (), peer=peer, channel=2, label="[done]")
        for peer in plan.peers:
            plan.add("wait", meeting, peer=peer, channel=2, label="[done]")
    outputs = [plan.here("output", 0, 1 if accumulate else world * chunks)] if consume else []
    return plan.finish(*outputs, *([plan.here("gathered", 0, world * chunks)] if keep else []))
