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
    at_once: bool = False,
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
        at_once: one step consumes every shard whole, once all are ready, where they lie: needs ``direct`` and one
            chunk, and neither ``keep`` nor ``accumulate``.
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
    if at_once and not (direct and consume and chunks == 1 and not keep and not accumulate):
        raise ValueError("at_once takes whole shards where they lie: direct, chunks=1, without keep and accumulate")
    gather = _Gather(
        plan,
        lanes=compute[:1] if accumulate or at_once else compute,  # sums into one output cannot overlap
        in_place=direct and consume and not keep,
        symmetric=symmetric,
    )
    outbound = outbound or (gather.reading if symmetric else copy)
    if outbound not in (copy, compute[0]):
        raise ValueError(f"outbound is {outbound!r}: name the copy stream, {copy!r}, or the caller's, {compute[0]!r}")
    if world > 1:
        gather.publish(outbound)
    # The copy stream's work is enqueued ahead of the matmuls, which could fill the device. On a shared stream,
    # though, the own shard comes before the first wait.
    if not gather.in_place and not (plan.merged and consume):
        gather.pull_all()
    if at_once:
        gather.consume_at_once()
    elif consume:
        if sleep and world > 1 and outbound != compute[0]:
            for stream in gather.lanes[:chunks]:
                plan.add("sleep", stream)
        gather.consume_all(accumulate)
    for piece in plan.pieces if keep else ():  # the only reason to copy the own shard
        plan.pull((rank, piece), plan.here("input", piece), plan.here("gathered", plan.unit(rank, piece)))
    if symmetric:
        gather.let_go()
    outputs = [plan.here("output", 0, 1 if accumulate else world * chunks)] if consume else []
    return plan.finish(*outputs, *([plan.here("gathered", 0, world * chunks)] if keep else []))


class _Gather:
    """The parts of one plan, in the order in which they are added, and what they have in common."""

    def __init__(self, plan: Builder, lanes: tuple[str, ...], in_place: bool, symmetric: bool) -> None:
        self.plan, self.lanes, self.in_place, self.symmetric = plan, lanes, in_place, symmetric
        self.shared = "input" if symmetric else plan.workspace  # where peers find a shard
        self.reading = lanes[0] if in_place else plan.copy  # the stream that knows when shards have been read
        # The whole symmetric input is ready at once, so one signal a channel will do.
        self.signals = plan.chunks if not symmetric else min(plan.chunks, len(lanes)) if in_place else 1
        self.pulls: dict[tuple[int, int], int] = {}
        self.consumed: list[int] = []

    def lane(self, reader: int, owner: int, piece: int) -> int:
        """Which compute stream of ``reader`` consumes a chunk."""
        return self.plan.unit((owner - reader) % self.plan.world, piece) % len(self.lanes)

    def channel(self, reader: int, owner: int, piece: int) -> int:
        """On which channel ``reader`` waits for a chunk: one for each stream that does. Both ends must agree on it."""
        return self.lane(reader, owner, piece) if self.in_place else 0

    def publish(self, stream: str) -> None:
        """Put the own shard where peers can read it, and tell them, first the one that wants it first."""
        plan = self.plan
        for piece in plan.pieces:
            chunk = (plan.rank, piece)
            if not self.symmetric:
                source, target = plan.here("input", piece), plan.here(self.shared, piece)
                plan.add("publish", stream, reads=[source], writes=[target], chunk=chunk)
            for peer in reversed(plan.peers) if piece < self.signals else ():
                channel = self.channel(peer, *chunk)
                plan.add("signal", stream, peer=peer, channel=channel, chunk=chunk, label="[ready]")

    def await_ready(self, stream: str, owner: int, piece: int) -> Region:
        """Wait for a peer's chunk; return where it lies."""
        if piece < self.signals:
            channel = self.channel(self.plan.rank, owner, piece)
            self.plan.add("wait", stream, peer=owner, channel=channel, chunk=(owner, piece), label="[ready]")
        return Region(self.shared, owner, piece, piece + 1)

    def pull(self, owner: int, piece: int) -> Region:
        """Copy a peer's chunk, once; return where it will be."""
        target = self.plan.here("gathered", self.plan.unit(owner, piece))
        if (owner, piece) not in self.pulls:
            source = self.await_ready(self.plan.copy, owner, piece)
            self.pulls[owner, piece] = self.plan.pull((owner, piece), source, target)
        return target

    def pull_all(self) -> None:
        """Copy every peer's shard."""
        for owner in self.plan.peers:
            for piece in self.plan.pieces:
                self.pull(owner, piece)

    def consume_all(self, accumulate: bool) -> None:
        """Compute with every chunk, the own ones first."""
        plan = self.plan
        for owner in [plan.rank, *plan.peers]:
            for piece in plan.pieces:
                stream = self.lanes[self.lane(plan.rank, owner, piece)]
                if owner == plan.rank:
                    source = plan.here("input", piece)
                elif self.in_place:
                    source = self.await_ready(stream, owner, piece)
                else:
                    source = self.pull(owner, piece)
                after = [self.pulls[owner, piece]] if (owner, piece) in self.pulls else []
                output = plan.here("output", 0 if accumulate else plan.unit(owner, piece))
                reads = [source, output] if accumulate and self.consumed else [source]
                step = plan.add("consume", stream, reads=reads, writes=[output], after=after, chunk=(owner, piece))
                self.consumed.append(step)

    def consume_at_once(self) -> None:
        """Compute with every shard in one step, which reads them in rank order."""
        plan = self.plan
        shards = {owner: self.await_ready(self.reading, owner, 0) for owner in plan.peers}
        shards[plan.rank] = plan.here("input", 0)
        reads = [shards[owner] for owner in range(plan.world)]
        self.consumed.append(
            plan.add("consume", self.reading, reads=reads, writes=[plan.here("output", 0, plan.world)])
        )

    def let_go(self) -> None:
        """Tell peers that their inputs are read; wait until they have read this one: then it is the caller's again."""
        for peer in self.plan.peers:
            after = self.consumed if self.in_place else ()
            self.plan.add("signal", self.reading, after=after, peer=peer, channel=2, label="[done]")
        for peer in self.plan.peers:
            self.plan.add("wait", self.reading, peer=peer, channel=2, label="[done]")
