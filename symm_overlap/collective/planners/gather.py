"""The parts of a plan that gathers the shards of all ranks on every rank, in the order in which they are added."""

from __future__ import annotations

from ...plan import Life, Region
from .builder import CollectiveBuilder, grouped
from .kinds import ANNOUNCE, CONSUME, PUBLISH

_DONE = 2  # the channel of signals that a symmetric input has been read; channels 0 and 1 signal that it is ready


def gather_buffers(symmetric: bool, keep: bool, announce_offset: bool) -> dict[str, Life]:
    """Return the buffers of a plan that gathers."""
    shared = {"workspace": Life.CALL} if not symmetric else {"offset": Life.CALL} if announce_offset else {}
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
        in_place: chunks are consumed directly from the peer's memory, without a copy.
        symmetric: peers can read the input itself, once they know the offset at which it begins.
        announce_offset: the peers do not know that offset before the call, so the plan announces it.
        ring: the number of chunks that "gathered" has room for; the chunks of peers use these places in turn. None:
            there is room for the chunks of all ranks.
    """

    def __init__(
        self,
        plan: CollectiveBuilder,
        streams: tuple[str, ...],
        in_place: bool,
        symmetric: bool,
        announce_offset: bool,
        ring: int | None = None,
    ) -> None:
        self.plan, self.streams, self.in_place, self.symmetric, self.ring = plan, streams, in_place, symmetric, ring
        self.announce_offset = announce_offset
        self.reading = streams[0] if in_place else plan.copy  # the stream that says when shards have been read
        # The whole symmetric input is ready at once, so one signal for each channel is enough.
        self.signals = plan.chunks if not symmetric else min(plan.chunks, len(streams)) if in_place else 1
        self.signals_sent: list[list[int]] = []  # for each piece that has signals, their steps
        self.pulls: dict[tuple[int, int], int] = {}
        self._together = {chunk: span for span in plan.spans() for chunk in span}
        self._awaited: set[tuple[int, int]] = set()
        self.consumed: list[int] = []

    def turn(self, reader: int, owner: int, piece: int) -> int:
        """Return the index of the compute stream on which ``reader`` consumes a chunk."""
        return self.plan.unit((owner - reader) % self.plan.world, piece) % len(self.streams)

    def channel(self, reader: int, owner: int, piece: int) -> int:
        """Return the channel on which ``reader`` waits for a chunk. There is one for each waiting stream.

        Reader and owner must use the same channel.
        """
        return self.turn(reader, owner, piece) if self.in_place else 0

    def publish(self, stream: str) -> None:
        """Copy the local shard to where the peers can read it, or announce where it begins, and signal the peers.

        The peer that fetches the shard first is signalled first.
        """
        plan = self.plan
        if self.symmetric and self.announce_offset:
            plan.add(ANNOUNCE, stream, writes=[plan.here("offset", 0)])
        for piece in plan.pieces:
            chunk = (plan.rank, piece)
            if not self.symmetric:
                source, target = plan.here("input", piece), plan.here("workspace", piece)
                plan.add(PUBLISH, stream, reads=[source], writes=[target], chunk=chunk)
            if piece < self.signals:
                signals: list[int] = []
                for channel, peers in grouped({peer: self.channel(peer, *chunk) for peer in reversed(plan.peers)}):
                    signals += plan.signal(stream, peers, channel, chunk=chunk, label="[ready]")
                self.signals_sent.append(signals)

    def await_ready(self, stream: str, owners: list[int], piece: int) -> None:
        """Wait for one chunk of each of ``owners``, with one step for each channel.

        A wait comes after this rank's own signals for that piece. Otherwise every rank could start its wait before its
        signals, and all would wait for ever. This can happen only in a CUDA graph (`symm_overlap.plan.graph_order`),
        where nothing is read in place, so the dependency is left out if ``in_place``.
        """
        plan = self.plan
        for channel, group in grouped({owner: self.channel(plan.rank, owner, piece) for owner in owners}):
            if piece < self.signals:
                chunk = (group[0] if len(group) == 1 else plan.rank, piece)
                signals = [] if self.in_place else self.signals_sent[piece]
                plan.wait(stream, group, channel, after=signals, chunk=chunk, label="[ready]")

    def shard(self, owner: int, piece: int) -> list[Region]:
        """Return the region of a peer's chunk, and, if its offset is announced, also the region with that offset."""
        where = Region("input" if self.symmetric else "workspace", owner, piece, piece + 1)
        return [where, Region("offset", owner, 0, 1)] if self.symmetric and self.announce_offset else [where]

    def pull(self, owner: int, piece: int) -> Region:
        """Copy a peer's chunk, unless it is copied already; return the region of the copy."""
        plan, after = self.plan, []
        place = plan.unit(owner, piece)
        if self.ring is not None:
            turn = plan.unit((owner - plan.rank) % plan.world - 1, piece)  # its position among all chunks of peers
            place = turn % self.ring
            if turn >= self.ring:  # after the matmul with the chunk that was there; own chunks' matmuls come first
                after = [self.consumed[plan.chunks + turn - self.ring]]
        target = plan.here("gathered", place)
        if (owner, piece) not in self.pulls:
            if (owner, piece) not in self._awaited:
                self._await_together(owner, piece)
            sources = self.shard(owner, piece)
            self.pulls[owner, piece] = plan.pull((owner, piece), target, *sources, after=after)
        return target

    def _await_together(self, owner: int, piece: int) -> None:
        """Wait for a peer's chunk, and for those that are multiplied together with it, with one step a copy stream.

        So copies follow each other without waits between them, during which the link would be idle.
        """
        together = self._together[owner, piece]
        for stream, owners in self.plan.by_copy_stream(each for each, _ in together):
            self.await_ready(stream, owners, piece)
        self._awaited.update(together)

    def pull_own(self) -> None:
        """Copy the local shard into the gathered tensor."""
        plan = self.plan
        for piece in plan.pieces:
            target = plan.here("gathered", plan.unit(plan.rank, piece))
            plan.pull((plan.rank, piece), target, plan.here("input", piece))

    def pull_all(self) -> None:
        """Copy the shards of all peers."""
        self._pull_first(None)

    def _pull_first(self, count: int | None) -> None:
        """Copy those of the first ``count`` chunks of peers that are not copied yet; None: of all chunks of peers."""
        for chunk in self._of_peers[len(self.pulls) : count]:
            self.pull(*chunk)

    @property
    def _of_peers(self) -> list[tuple[int, int]]:
        return [(owner, piece) for owner in self.plan.peers for piece in self.plan.pieces]

    def consume_all(self, accumulate: bool) -> None:
        """Compute with every chunk, this rank's own chunks first. A matmul may span the chunks of several peers.

        The copy streams are one chunk ahead of the matmuls, so that no matmul is issued behind waits and copies that it
        does not need.
        """
        plan = self.plan
        ahead = 0 if plan.merged or self.ring == 1 else 1
        own = [[(plan.rank, piece)] for piece in plan.pieces]
        for turn, run in enumerate([*own, *(run for span in plan.spans() for run in plan.runs(span))]):
            if turn >= len(own) and not self.in_place:
                self._pull_first(len(self.consumed) - plan.chunks + len(run) + ahead)
            self._consume(self.streams[turn % len(self.streams)], run, accumulate)

    def _consume(self, stream: str, run: list[tuple[int, int]], accumulate: bool) -> None:
        """Compute with chunks that are next to each other in memory, in one step."""
        plan, (owner, piece) = self.plan, run[0]
        if owner == plan.rank:
            reads = [plan.here("input", piece)]
        elif self.in_place:
            self.await_ready(stream, [owner], piece)
            reads = self.shard(owner, piece)
        else:
            places = [self.pull(*chunk) for chunk in run]
            reads = [Region("gathered", plan.rank, places[0].start, places[-1].stop)]
        after = [self.pulls[chunk] for chunk in run if chunk in self.pulls]
        output = plan.here("output", 0) if accumulate else plan.here("output", plan.unit(owner, piece), len(run))
        if accumulate and self.consumed:
            reads.append(output)
        step = plan.add(CONSUME, stream, reads=reads, writes=[output], after=after, chunk=run[0])
        self.consumed += [step] * len(run)

    def consume_at_once(self) -> None:
        """Compute with all shards in one step. It reads them in place, in rank order, or from the gathered tensor."""
        plan = self.plan
        if self.in_place:
            self.await_ready(self.reading, plan.peers, 0)
            own = [plan.here("input", 0)]
            shards = [own if owner == plan.rank else self.shard(owner, 0) for owner in range(plan.world)]
            # First the shards, in rank order; then the regions with the offsets of the peers' shards.
            reads = [each[0] for each in shards] + [region for each in shards for region in each[1:]]
        else:
            reads = [plan.here("gathered", 0, plan.world)]
        self.consumed.append(
            plan.add(CONSUME, self.streams[0], reads=reads, writes=[plan.here("output", 0, plan.world)])
        )

    def release_inputs(self) -> None:
        """Signal the peers that their inputs are read, and wait until they have read this rank's input.

        After that the caller may overwrite the input.
        """
        after = self.consumed if self.in_place else self.plan.copied
        self.plan.signal(self.reading, self.plan.peers, _DONE, after=after, label="[done]")
        self.plan.wait(self.reading, self.plan.peers, _DONE, label="[done]")
