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


class FusedReduction:
    """Adds to a plan the steps of a kernel that makes partial sums, and those that exchange them and add them up.

    Args:
        plan: the plan to add to.
        sums: the stream of the sums.
        apart: see `fused_all_gather_matmul`.

    Raises:
        ValueError: the streams of the kernel, of the copies and of the sums are not three.
    """

    def __init__(self, plan: CollectiveBuilder, sums: str, *, apart: bool) -> None:
        if len({plan.compute[0], plan.copy, sums}) < 3:
            streams = f"{plan.compute[0]!r}, {plan.copy!r} and {sums!r}"
            raise ValueError(f"the streams are {streams}: the kernel, copies and sums take one each")
        self.plan, self.sums, self.apart = plan, sums, apart
        self.made: dict[tuple[int, int], int] = {}
        self.told: list[int] = []  # the last signal that partial sums are there

    def produce(self) -> None:
        """Make the chunks of all ranks in one kernel, and push each to its owner once it is made."""
        plan, stream = self.plan, self.plan.compute[0]
        for owner in [*plan.peers, plan.rank]:
            for piece in plan.pieces:
                unit = plan.unit(owner, piece)
                self.made[owner, piece] = plan.add(
                    TILES,
                    f"{stream}.{unit}" if self.apart else stream,
                    reads=[plan.here("input", unit)],
                    writes=[plan.here("product", unit)],
                    chunk=(owner, piece),
                    label="[made]",
                )
        for chunk, made in self.made.items():
            owner, piece = chunk
            if owner != plan.rank:
                plan.add(POLL, plan.copy, after=[made], chunk=chunk, label="[made]")
                unit = plan.unit(plan.rank, piece)
                source, target = plan.here("product", plan.unit(*chunk)), Region("workspace", owner, unit, unit + 1)
                plan.add(PUSH, plan.copy, reads=[source], writes=[target], peers=(owner,), chunk=chunk)
                self.told = plan.signal(plan.copy, [owner], 0, chunk=chunk, label="[partial]")

    def reduce(self, piece: int, targets: list[Region]) -> None:
        """Add up a piece of this rank's part into each of ``targets``."""
        plan = self.plan
        partials = {each: plan.here("workspace", plan.unit(each, piece)) for each in plan.peers}
        partials[plan.rank] = plan.here("product", plan.unit(plan.rank, piece))
        # Behind the own signals, as every wait. It costs nothing: own rows, which the sum needs too, are made after all
        # that is signalled.
        chunk = plan.rank, piece
        plan.wait(self.sums, plan.peers, 0, after=self.told, chunk=chunk, label="[partial]")
        plan.add(POLL, self.sums, after=[self.made[chunk]], chunk=chunk, label="[made]")
        reads = [partials[producer] for producer in range(plan.world)]
        plan.add(REDUCE, self.sums, reads=reads, writes=targets, chunk=chunk)

    def share(self, piece: int) -> list[int]:
        """Tell every peer that a sum is ready, first the one that fetches it first."""
        plan = self.plan
        return plan.signal(self.sums, plan.peers[::-1], 1, chunk=(plan.rank, piece), label="[reduced]")
