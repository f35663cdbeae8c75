"""The parts of a plan in which every rank's shard comes to every rank, in the order in which they are added."""

from __future__ import annotations

from ...plan import Life, Region
from .builder import CollectiveBuilder, by_channel
from .kinds import ANNOUNCE, CONSUME, PUBLISH

_DONE = 2  # the channel on which ranks say that they have read a symmetric input; 0 and 1 say that it is ready


def gather_buffers(symmetric: bool, keep: bool, announce: bool = True) -> dict[str, Life]:
    """The buffers of a plan that gathers."""
    shared = {"workspace": Life.CALL} if not symmetric else {"offset": Life.CALL} if announce else {}
    return {
        "input": Life.INPUT,
        **shared,
        "gathered": Life.OUTPUT if keep else Life.SCRATCH,
        "output": Life.OUTPUT,
    }


class Gather:
    """Adds the steps of one all-gather to a plan.

    Args:
        plan: the plan to add to.
        streams: the compute streams that consume.
        in_place: chunks are consumed where they lie, in the peer's memory.
        symmetric: peers can read the input itself, once they know where it lies.
        announce: they do not know it before the call.
        ring: "gathered" has room for so many chunks, which peers' chunks use in turn; None: for those of all ranks.
    """

    def __init__(
        self,
        plan: CollectiveBuilder,
        streams: tuple[str, ...],
        in_place: bool,
        symmetric: bool,
        ring: int | None = None,
        announce: bool = True,
    ) -> None:
        self.plan, self.streams, self.in_place, self.symmetric, self.ring = plan, streams, in_place, symmetric, ring
        self.announce = announce
        self.reading = streams[0] if in_place else plan.copy  # the stream that knows when shards have been read
        # The whole symmetric input is ready at once, so one signal a channel will do.
        self.signals = plan.chunks if not symmetric else min(plan.chunks, len(streams)) if in_place else 1
        self.told: list[list[int]] = []  # for each piece that has signals, those steps
        self.pulls: dict[tuple[int, int], int] = {}
        self.consumed: list[int] = []

    def turn(self, reader: int, owner: int, piece: int) -> int:
        """Which compute stream of ``reader`` consumes a chunk."""
        return self.plan.unit((owner - reader) % self.plan.world, piece) % len(self.streams)

    def channel(self, reader: int, owner: int, piece: int) -> int:
        """On which channel ``reader`` waits for a chunk: one for each stream that does. Both ends must agree on it."""
        return self.turn(reader, owner, piece) if self.in_place else 0

    def publish(self, stream: str) -> None:
        """Put the own shard where peers can read it, or say where it lies, and tell them, first the one that wants it
        first.
        """
        plan = self.plan
        if self.symmetric and self.announce:
            plan.add(ANNOUNCE, stream, writes=[plan.here("offset", 0)])
        for piece in plan.pieces:
            chunk = (plan.rank, piece)
            if not self.symmetric:
                source, target = plan.here("input", piece), plan.here("workspace", piece)
                plan.add(PUBLISH, stream, reads=[source], writes=[target], chunk=chunk)
            if piece < self.signals:
                told: list[int] = []
                for channel, peers in by_channel({peer: self.channel(peer, *chunk) for peer in reversed(plan.peers)}):
                    told += plan.signal(stream, peers, channel, chunk=chunk, label="[ready]")
                self.told.append(told)

    def await_ready(self, stream: str, owners: list[int], piece: int) -> None:
        """Wait for a chunk of each of some peers, with one step a channel.

        A wait comes after this rank's own signals for that piece: if one rank could wait first, all ranks could. Only
        in a CUDA graph could they (`symm_overlap.plan.graph_order`), and there nothing is read in place.
        """
        plan = self.plan
        for channel, group in by_channel({owner: self.channel(plan.rank, owner, piece) for owner in owners}):
            if piece < self.signals:
                chunk = (group[0] if len(group) == 1 else plan.rank, piece)
                told = [] if self.in_place else self.told[piece]
                plan.wait(stream, group, channel, after=told, chunk=chunk, label="[ready]")

    def shard(self, owner: int, piece: int) -> list[Region]:
        """Where a peer's chunk lies, and then, if it must be read too, what says so."""
        where = Region("input" if self.symmetric else "workspace", owner, piece, piece + 1)
        return [where, Region("offset", owner, 0, 1)] if self.symmetric and self.announce else [where]

    def pull(self, owner: int, piece: int) -> Region:
        """Copy a peer's chunk, once; return where it will be."""
        plan, after = self.plan, []
        place = plan.unit(owner, piece)
        if self.ring is not None:
            turn = plan.unit((owner - plan.rank) % plan.world - 1, piece)  # of all chunks of peers, in order
            place = turn % self.ring
            if turn >= self.ring:  # behind the matmul with the chunk that was there, and those with the own chunks
                after = [self.consumed[plan.chunks + turn - self.ring]]
        target = plan.here("gathered", place)
        if (owner, piece) not in self.pulls:
            self.await_ready(plan.copy, [owner], piece)
            sources = self.shard(owner, piece)
            self.pulls[owner, piece] = plan.pull((owner, piece), target, *sources, after=after)
        return target

    def pull_own(self) -> None:
        """Copy the own shard into the gathered tensor."""
        plan = self.plan
        for piece in plan.pieces:
            target = plan.here("gathered", plan.unit(plan.rank, piece))
            plan.pull((plan.rank, piece), target, plan.here("input", piece))

    def pull_all(self) -> None:
        """Copy every peer's shard."""
        self._pull_first(None)

    def _pull_first(self, count: int | None) -> None:
        """Copy so many chunks of peers, less those that are copied already."""
        for chunk in self._of_peers[len(self.pulls) : count]:
            self.pull(*chunk)

    @property
    def _of_peers(self) -> list[tuple[int, int]]:
        return [(owner, piece) for owner in self.plan.peers for piece in self.plan.pieces]

    def consume_all(self, accumulate: bool) -> None:
        """Compute with every chunk, the own ones first. The copy stream is one chunk ahead of the matmuls, so that no
        matmul is issued behind waits and copies that it does not need.
        """
        plan = self.plan
        ahead = 0 if plan.merged or self.ring == 1 else 1
        for owner in [plan.rank, *plan.peers]:
            for piece in plan.pieces:
                stream = self.streams[self.turn(plan.rank, owner, piece)]
                if owner == plan.rank:
                    reads = [plan.here("input", piece)]
                elif self.in_place:
                    self.await_ready(stream, [owner], piece)
                    reads = self.shard(owner, piece)
                else:
                    self._pull_first(len(self.consumed) - plan.chunks + 1 + ahead)
                    reads = [self.pull(owner, piece)]
                after = [self.pulls[owner, piece]] if (owner, piece) in self.pulls else []
                output = plan.here("output", 0 if accumulate else plan.unit(owner, piece))
                if accumulate and self.consumed:
                    reads.append(output)
                step = plan.add(CONSUME, stream, reads=reads, writes=[output], after=after, chunk=(owner, piece))
                self.consumed.append(step)

    def consume_at_once(self) -> None:
        """Compute with every shard in one step: where they lie, in rank order, or in the gathered tensor."""
        plan = self.plan
        if self.in_place:
            self.await_ready(self.reading, plan.peers, 0)
            own = [plan.here("input", 0)]
            shards = [own if owner == plan.rank else self.shard(owner, 0) for owner in range(plan.world)]
            # First the shards, in rank order; then what says where peers' shards lie.
            reads = [each[0] for each in shards] + [region for each in shards for region in each[1:]]
        else:
            reads = [plan.here("gathered", 0, plan.world)]
        self.consumed.append(
            plan.add(CONSUME, self.streams[0], reads=reads, writes=[plan.here("output", 0, plan.world)])
        )

    def release_inputs(self) -> None:
        """Tell peers that their inputs are read; wait until they have read this one: then it is the caller's again."""
        after = self.consumed if self.in_place else ()
        self.plan.signal(self.reading, self.plan.peers, _DONE, after=after, label="[done]")
        self.plan.wait(self.reading, self.plan.peers, _DONE, label="[done]")
