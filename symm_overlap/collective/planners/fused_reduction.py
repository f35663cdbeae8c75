"""The parts of a plan in which one kernel computes partial results for all ranks, in the order in which they are added.

The kernel computes the rows for rank+1 first and this rank's own rows last. The last tile of a chunk sets the chunk's
flag. A copy stream then pushes the chunk into the memory of its owner and signals the owner. The owner sums a chunk
in rank order as soon as it has all partial results for it.

A peer's memory is written only after that peer has read its previous contents. Call k writes to the half of the
workspace that call k-2 used. In call k-1 every rank is signalled by every other rank, after that rank's call k-2 has
ended.
"""

from __future__ import annotations

from ...plan import Life, Region
from .builder import CollectiveBuilder
from .kinds import POLL, PUSH, REDUCE, TILES

BUFFERS = {
    "input": Life.INPUT,
    "workspace": Life.CALL,
    "product": Life.SCRATCH,
    "output": Life.OUTPUT,
}
"""In chunks: "input" and "product" have ``world * chunks``, ordered by the rank a chunk is for. "workspace" has as
many, ordered by the rank a chunk is from; no rank pushes to its own part.
"""


class FusedReduction(CollectiveBuilder):
    """Builds a plan in which one kernel computes partial sums, which are exchanged and added up.

    Args:
        op, rank, world, chunks: see `CollectiveBuilder`.
        stream, copy, sums: the streams of the kernel, of the copies and of the sums.
        apart, copies: see `fused_all_gather_matmul`.

    Raises:
        ValueError: an argument is out of range, or the streams are not different.
    """

    def __init__(
        self,
        op: str,
        rank: int,
        world: int,
        chunks: int,
        stream: str,
        copy: str,
        sums: str,
        *,
        apart: bool,
        copies: int,
    ) -> None:
        names = [stream, copy, sums, *[f"{copy}1"] * (copies == 2)]
        if len(set(names)) < len(names):
            streams = f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
            raise ValueError(f"the streams are {streams}: the kernel, copies and sums need different ones")
        super().__init__(
            op, rank, world, chunks, (stream,), copy, buffers=BUFFERS, inputs=world * chunks, copies=copies
        )
        self.sums, self.apart = sums, apart
        self.tile_steps: dict[tuple[int, int], int] = {}
        self.signals_sent: dict[str, int] = {}  # for each copy stream, the last signal that a partial sum is ready

    def produce(self) -> None:
        """Compute the chunks for all ranks in one kernel, and push each chunk to its owner once it is computed."""
        stream = self.compute[0]
        for owner in [*self.peers, self.rank]:
            for piece in self.pieces:
                unit = self.unit(owner, piece)
                self.tile_steps[owner, piece] = self.add(
                    TILES,
                    f"{stream}.{unit}" if self.apart else stream,
                    reads=[self.here("input", unit)],
                    writes=[self.here("product", unit)],
                    chunk=(owner, piece),
                    label="[made]",
                )
        pushed: dict[str, tuple[int, int]] = {}  # for each copy stream, the chunk that is signalled next
        for chunk, tile_step in self.tile_steps.items():
            owner, piece = chunk
            if owner != self.rank:
                stream, unit = self.copy_for(owner), self.unit(self.rank, piece)
                # A signal comes right before the stream's next poll. Then one call of the driver can do both.
                self._signal_partial(stream, pushed)
                self.add(POLL, stream, after=[tile_step], chunk=chunk, label="[made]")
                source, target = self.here("product", self.unit(*chunk)), Region("workspace", owner, unit, unit + 1)
                self.move(PUSH, owner, reads=[source], writes=[target], peers=(owner,), chunk=chunk)
                pushed[stream] = chunk
        for each in list(pushed):
            self._signal_partial(each, pushed)

    def _signal_partial(self, stream: str, pushed: dict[str, tuple[int, int]]) -> None:
        if stream in pushed:
            chunk = pushed.pop(stream)
            (self.signals_sent[stream],) = self.signal(stream, [chunk[0]], 0, chunk=chunk, label="[partial]")

    def reduce(self, piece: int, targets: list[Region]) -> None:
        """Add up a piece of this rank's part into each of ``targets``."""
        partials = {each: self.here("workspace", self.unit(each, piece)) for each in self.peers}
        partials[self.rank] = self.here("product", self.unit(self.rank, piece))
        # Like every wait, this one comes after the rank's own signals. It costs nothing: the sum also needs this rank's
        # own rows, which the kernel computes after all the rows that it signals.
        chunk = self.rank, piece
        arriving = self.peers[::-1]  # in the order in which their chunks arrive
        self.wait(self.sums, arriving, 0, after=self.signals_sent.values(), chunk=chunk, label="[partial]")
        self.add(POLL, self.sums, after=[self.tile_steps[chunk]], chunk=chunk, label="[made]")
        reads = [partials[producer] for producer in range(self.world)]
        self.add(REDUCE, self.sums, reads=reads, writes=targets, chunk=chunk)

    def share(self, piece: int) -> list[int]:
        """Signal every peer that a sum is ready. The peer that fetches it first is signalled first."""
        return self.signal(self.sums, self.peers[::-1], 1, chunk=(self.rank, piece), label="[reduced]")
