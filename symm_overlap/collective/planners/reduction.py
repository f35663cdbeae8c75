"""The parts of a plan that sums the partial results of all ranks, in the order in which they are added."""

from __future__ import annotations

from collections.abc import Sequence

from ...plan import Life, Region
from .builder import CollectiveBuilder, grouped
from .kinds import PRODUCE, REDUCE

_REDUCED = 2  # the first channel of signals that a sum is ready; channels 0 and 1 signal that a partial sum is


def reducing(
    op: str, rank: int, world: int, chunks: int, compute: tuple[str, ...], copy: str, **how: int
) -> CollectiveBuilder:
    """Return the builder of a plan that reduces, with its buffers. The arguments are those of `CollectiveBuilder`."""
    buffers = {
        "input": Life.INPUT,
        "workspace": Life.CALL,
        "stage": Life.SCRATCH,
        "product": Life.OUTPUT,
        "output": Life.OUTPUT,
    }
    inputs = world * chunks
    return CollectiveBuilder(op, rank, world, chunks, compute, copy, buffers=buffers, inputs=inputs, **how)


class Reduction:
    """Adds the steps that compute partial sums, exchange them, and add them up to a plan.

    Args:
        plan: the plan to add to.
        in_place: partial sums are read directly from the peer's memory and not copied.
        streams: the compute streams that produce.
        keep: the chunks that this rank computes for all ranks are an output too ("product"). The step that produces a
            chunk also writes it there.
        own: with ``keep``, this rank's own chunks are written only to "product", and the sum reads them there.
    """

    def __init__(
        self,
        plan: CollectiveBuilder,
        in_place: bool,
        streams: tuple[str, ...],
        *,
        keep: bool = False,
        own: bool = False,
    ) -> None:
        self.plan, self.in_place, self.streams, self.keep = plan, in_place, streams, keep
        self.own = "product" if keep and own else "workspace"  # where the sum reads this rank's own chunks
        # By chunk that arrives, this rank's own signals until then: the last one of each stream.
        self.signals_sent: dict[tuple[int, int], list[int]] = {}
        self.shared: list[list[int]] = []  # for each piece, the signal that its sum is ready
        self.pulls: dict[tuple[int, int], int] = {}
        spans = [*plan.spans(shrinking=True), *([(plan.rank, piece)] for piece in plan.pieces)]
        self.runs = [run for span in spans for run in plan.runs(span)]
        self.stream = {chunk: self._turn(number) for number, run in enumerate(self.runs) for chunk in run}

    def _turn(self, number: int) -> int:
        """Return the index of the compute stream for a matmul."""
        return (len(self.streams) - 1 - number) % len(self.streams)

    def channel(self, producer: int, owner: int, piece: int) -> int:
        """Return the channel on which ``producer`` signals that a chunk for ``owner`` is ready.

        It is the index of the compute stream, so that the signals of each stream are counted apart. If matmuls span
        several parts, a pair of ranks has only one signal, and ranks may compute it on different streams.
        """
        position = self.plan.unit((owner - producer - 1) % self.plan.world, piece)
        return self._turn(position) if self.plan.span == 1 else 0

    def produce_all(self, sleep: bool) -> None:
        """Compute the chunks for every rank, this rank's own last. A matmul may span the chunks for several peers.

        Signal the owner of each chunk, and pull the chunks that arrive meanwhile.
        """
        plan = self.plan
        sleep = sleep and len(self.streams) == 2
        last: dict[int, list[int]] = {}
        for run in self.runs:
            owner, piece = run[0]
            turn = self.stream[run[0]]
            if sleep and turn == 0:
                plan.add("sleep", plan.compute[0])
                sleep = False
            unit, stream = plan.unit(owner, piece), plan.compute[turn]
            sources, targets = [plan.here("input", unit, len(run))], self._targets(unit, len(run))
            plan.add(PRODUCE, stream, reads=sources, writes=targets, chunk=run[0])
            if owner == plan.rank:
                continue
            owners = [each for each, _ in run]
            channel = self.channel(plan.rank, owner, piece)
            last[turn] = plan.signal(stream, owners, channel, chunk=run[0], label="[partial]")
            # Meanwhile rank-1 computes for this rank.
            arriving = [(2 * plan.rank - each) % plan.world for each in owners]
            for each in arriving:
                self.signals_sent[each, piece] = [step for sent in last.values() for step in sent]
            if not self.in_place and not plan.merged:
                self.pull_together(arriving, piece)

    def produce_at_once(self) -> None:
        """Compute the chunks for every rank in one step, and then signal their owners."""
        plan, stream = self.plan, self.streams[0]
        plan.add(PRODUCE, stream, reads=[plan.here("input", 0, plan.world)], writes=self._targets(0, plan.world))
        plan.signal(stream, plan.peers, 0, chunk=(plan.rank, 0), label="[partial]")

    def _targets(self, unit: int, count: int) -> list[Region]:
        """Return the regions to which produced chunks are written."""
        buffers = ["workspace", "product"] if self.keep else ["workspace"]
        if count == 1 and unit // self.plan.chunks == self.plan.rank and self.own == "product":
            buffers = ["product"]
        return [self.plan.here(buffer, unit, count) for buffer in buffers]

    def await_partials(self, stream: str, producers: list[int], piece: int, signals: Sequence[int] = ()) -> None:
        """Wait for the chunks of ``producers`` for this rank, with one step a channel, after the steps ``signals``."""
        plan = self.plan
        for channel, group in grouped({producer: self.channel(producer, plan.rank, piece) for producer in producers}):
            chunk = (group[0] if len(group) == 1 else plan.rank, piece)
            plan.wait(stream, group, channel, after=signals, chunk=chunk, label="[partial]")

    def partial(self, producer: int, piece: int) -> Region:
        """Return the region, in the peer's memory, of a chunk that the peer computed for this rank."""
        unit = self.plan.unit(self.plan.rank, piece)
        return Region("workspace", producer, unit, unit + 1)

    def pull_together(self, producers: list[int], piece: int) -> None:
        """Copy chunks that peers compute for this rank at the same time. One step a copy stream waits for them.

        The wait comes after this rank's own signals of the same turn and of all turns before. Otherwise every rank
        could start its wait before its signals, and all would wait for ever.
        """
        for stream, group in self.plan.by_copy_stream(producers):
            self.await_partials(stream, group, piece, self.signals_sent.get((group[0], piece), ()))
        for each in producers:
            self.pulls[each, piece] = self.plan.pull((each, piece), self.stage(each, piece), self.partial(each, piece))

    def stage(self, producer: int, piece: int) -> Region:
        """Return the region of the copy of a chunk that a peer computed for this rank."""
        return self.plan.here("stage", self.plan.unit(producer, piece))

    def reduce(self, piece: int, targets: list[Region]) -> None:
        """Add up a piece of this rank's part, in rank order, on the stream that computed its own partial sum."""
        plan = self.plan
        turn = self.stream[plan.rank, piece]
        partials = {plan.rank: plan.here(self.own, plan.unit(plan.rank, piece))}
        producers = plan.peers[::-1]  # in the order in which their chunks arrive
        if self.in_place:
            self.await_partials(plan.compute[turn], producers, piece)
        for producer in producers:
            if not self.in_place and (producer, piece) not in self.pulls:
                self.pull_together([producer], piece)
            partials[producer] = self.partial(producer, piece) if self.in_place else self.stage(producer, piece)
        after = [pull for (_, pulled), pull in self.pulls.items() if pulled == piece]
        reads = [partials[producer] for producer in range(plan.world)]
        plan.add(REDUCE, plan.compute[turn], reads=reads, writes=targets, after=after, chunk=(plan.rank, piece))

    def reduced(self, owner: int, piece: int) -> Region:
        """Return the region where a rank stores the sum of a piece for its peers.

        It overwrites the rank's own partial sum, which only this rank reads.
        """
        unit = self.plan.unit(owner, piece)
        return Region("workspace", owner, unit, unit + 1)

    def share(self, piece: int) -> None:
        """Signal every peer that a sum is ready. The peer that fetches it first is signalled first."""
        plan = self.plan
        chunk = (plan.rank, piece)
        stream, channel = self.streams[self.stream[chunk]], _REDUCED + self.channel(plan.rank, *chunk)
        self.shared.append(plan.signal(stream, plan.peers[::-1], channel, chunk=chunk, label="[reduced]"))

    def collect(self, piece: int) -> None:
        """Copy the sums of all peers.

        The sums of all peers are due at the same moment, so one step waits for all of them.
        """
        plan = self.plan
        chunk = (plan.rank, piece)
        after = [] if self.in_place else self.shared[piece]
        if piece == 0 and len(self.streams) == 2:
            # The wait comes after all waits for partial sums, because peers share their sums only after such waits.
            # With one compute stream it does in any case: the sum of a piece follows the matmuls of all pieces.
            after = [*after, *plan.copied]
        channel = _REDUCED + self.channel(plan.rank, *chunk)
        waits = plan.wait(plan.copy, plan.peers, channel, after=after, chunk=chunk, label="[reduced]")
        for owner in plan.peers:
            chunk = (owner, piece)
            target = plan.here("output", plan.unit(*chunk))
            plan.pull(chunk, target, self.reduced(owner, piece), after=waits, label="[reduced]")
