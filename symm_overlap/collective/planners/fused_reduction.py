"""The parts of a plan in which one kernel computes a partial result for every rank, in the order they are added in.

The kernel makes the rows for rank+1 first and the own ones last. The last tile of a chunk raises its flag, the copy
stream pushes the chunk into the memory of its owner and tells it, and the owner sums, in rank order, as soon as it has
all parts of a chunk.

A peer's memory is written only once that peer has read what was there. It is in the half of the workspace that the
call before the last one used: in between, every rank has been signalled by every other one, after that call.
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
"""In chunks: "input" and "product" ``world * chunks``, ordered by the rank a chunk is for; "workspace" as many, ordered
by the rank a chunk is from; nothing is pushed to the own part."""


class FusedReduction(CollectiveBuilder):
    """Builds a plan in which one kernel makes partial sums, which are exchanged and added up.

    Args:
        op, rank, world, chunks: see `CollectiveBuilder`.
        stream, copy, sums: the streams of the kernel, of the copies and of the sums.
        apart: see `fused_all_gather_matmul`.

    Raises:
        ValueError: an argument is out of range, or the streams are not three.
    """

    def __init__(
        self, op: str, rank: int, world: int, chunks: int, stream: str, copy: str, sums: str, *, apart: bool
    ) -> None:
        if len({stream, copy, sums}) < 3:
            streams = f"{stream!r}, {copy!r} and {sums!r}"
            raise ValueError(f"the streams are {streams}: the kernel, copies and sums take one each")
        super().__init__(op, rank, world, chunks, (stream,), copy, buffers=BUFFERS, inputs=world * chunks)
        self.sums, self.apart = sums, apart
        self.made: dict[tuple[int, int], int] = {}
        self.told: list[int] = []  # the last signal that partial sums are there

    def produce(self) -> None:
        """Make the chunks of all ranks in one kernel, and push each to its owner once it is made."""
        stream = self.compute[0]
        for owner in [*self.peers, self.rank]:
            for piece in self.pieces:
                unit = self.unit(owner, piece)
                self.made[owner, piece] = self.add(
                    TILES,
                    f"{stream}.{unit}" if self.apart else stream,
                    reads=[self.here("input", unit)],
                    writes=[self.here("product", unit)],
                    chunk=(owner, piece),
                    label="[made]",
                )
        for chunk, made in self.made.items():
            owner, piece = chunk
            if owner != self.rank:
                self.add(POLL, self.copy, after=[made], chunk=chunk, label="[made]")
                unit = self.unit(self.rank, piece)
                source, target = self.here("product", self.unit(*chunk)), Region("workspace", owner, unit, unit + 1)
                self.add(PUSH, self.copy, reads=[source], writes=[target], peers=(owner,), chunk=chunk)
                self.told = self.signal(self.copy, [owner], 0, chunk=chunk, label="[partial]")

    def reduce(self, piece: int, targets: list[Region]) -> None:
        """Add up a piece of this rank's part into each of ``targets``."""
        partials = {each: self.here("workspace", self.unit(each, piece)) for each in self.peers}
        partials[self.rank] = self.here("product", self.unit(self.rank, piece))
        # Behind the own signals, as every wait. It costs nothing: own rows, which the sum needs too, are made after all
        # that is signalled.
        chunk = self.rank, piece
        self.wait(self.sums, self.peers, 0, after=self.told, chunk=chunk, label="[partial]")
        self.add(POLL, self.sums, after=[self.made[chunk]], chunk=chunk, label="[made]")
        reads = [partials[producer] for producer in range(self.world)]
        self.add(REDUCE, self.sums, reads=reads, writes=targets, chunk=chunk)

    def share(self, piece: int) -> list[int]:
        """Tell every peer that a sum is ready, first the one that fetches it first."""
        return self.signal(self.sums, self.peers[::-1], 1, chunk=(self.rank, piece), label="[reduced]")
