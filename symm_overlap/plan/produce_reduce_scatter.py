"""Planner: compute a partial result for every rank, and sum what all ranks computed for this one.

The chunks of rank+1 are produced first and the own ones last, so that every chunk but the own travels behind a
matmul. Two compute streams take turns, the last one first: the caller's stream sleeps for a moment ahead of its first
chunk, so that every rank starts in the same order and none waits for another at each step. World size 4, one chunk,
rank 0::

    compute1  produce 1, signal 1 |                              | produce 3, signal 3 |
    compute0  sleep               | produce 2, signal 2          |                     | produce 0 | reduce
    copy                          | wait 3, pull 3               | wait 2, pull 2      | wait 1, pull 1

The sum is always in rank order, so each run gives the same bits. A reduction waits for peers, so none comes ahead of
a matmul. No barrier is needed between calls: `all_gather_consume` says why.
"""

from __future__ import annotations

from functools import lru_cache

from .builder import Builder
from .step import Plan, Region


@lru_cache(maxsize=4096)
def produce_reduce_scatter(
    rank: int,
    world: int,
    *,
    chunks: int = 1,
    compute: tuple[str, ...] = ("compute0",),
    copy: str = "copy",
    parity: int = 0,
    direct: bool = False,
    at_once: bool = False,
    sleep: bool = True,
) -> Plan:
    """The plan of ``rank`` for ``Y = reduce_scatter(X @ B)``.

    Args:
        chunks: pieces the part of each rank is cut into.
        compute: one or two streams that produce chunks, in turn; the first is the caller's.
        copy: the stream of the copies; ``compute[0]`` puts them on the caller's stream, so that one thread can run
            the plan.
        parity: number of the call on this workspace, modulo 2.
        direct: reduce straight from the peers' memory, without copies.
        at_once: one step produces what is for all ranks; needs one chunk.
        sleep: with two compute streams, make the last one start first on every rank.

    Buffers, in chunks: "input", "workspace{parity}" ``world * chunks``, ordered by the rank a chunk is for; "stage"
    ``world * chunks``, ordered by the rank a chunk is from, the own part unused; "output" ``chunks``.

    Raises:
        ValueError: an argument is out of range.
    """
    plan = Builder("produce_reduce_scatter", rank, world, chunks, compute, copy, parity, inputs=world * chunks)
    if at_once and chunks != 1:
        raise ValueError(f"at_once produces parts whole, but chunks is {chunks}")
    reduction = Reduction(plan, direct, lanes=compute[:1] if at_once else compute)
    if at_once:
        reduction.produce_at_once()
    else:
        reduction.produce_all(sleep)
    for piece in plan.pieces:
        reduction.reduce(piece, [plan.here("output", piece)])
    return plan.finish(plan.here("output", 0, chunks))


class Reduction:
    """The parts of a plan that computes partial sums, exchanges them, and adds them up."""

    def __init__(self, plan: Builder, direct: bool, lanes: tuple[str, ...]) -> None:
        self.plan, self.direct, self.lanes = plan, direct, lanes
        self.pulls: dict[tuple[int, int], int] = {}

    def lane(self, producer: int, owner: int, piece: int) -> int:
        """Which compute stream of ``producer`` computes a chunk. It is the signal's channel: both ends must agree."""
        position = self.plan.unit((owner - producer - 1) % self.plan.world, piece)
        return (len(self.lanes) - 1 - position) % len(self.lanes)

    def produce_all(self, sleep: bool) -> None:
        """Compute every rank's chunks, the own ones last; tell whom they are for, and pull what comes meanwhile."""
        plan = self.plan
        sleep = sleep and len(self.lanes) == 2
        for owner in [*plan.peers, plan.rank]:
            arriving = (2 * plan.rank - owner) % plan.world  # while I work for rank+1, rank-1 works for me
            for piece in plan.pieces:
                lane = self.lane(plan.rank, owner, piece)
                if sleep and lane == 0:
                    plan.add("sleep", plan.compute[0])
                    sleep = False
                source, target = (plan.here(name, plan.unit(owner, piece)) for name in ("input", plan.workspace))
                chunk = (owner, piece)
                plan.add("produce", plan.compute[lane], reads=[source], writes=[target], chunk=chunk)
                if owner != plan.rank:
                    plan.add("signal", plan.compute[lane], peer=owner, channel=lane, chunk=chunk, label="[partial]")
                    if not self.direct and not plan.merged:
                        self.pull(arriving, piece)

    def produce_at_once(self) -> None:
        """Compute the chunks of every rank in one step; then tell whom they are for."""
        plan, stream = self.plan, self.lanes[0]
        source, target = (plan.here(name, 0, plan.world) for name in ("input", plan.workspace))
        plan.add("produce", stream, reads=[source], writes=[target])
        for owner in plan.peers:
            plan.add("signal", stream, peer=owner, channel=0, chunk=(owner, 0), label="[partial]")

    def await_partial(self, stream: str, producer: int, piece: int) -> Region:
        """Wait for a chunk that a peer computed for this rank; return where it lies."""
        channel, unit = self.lane(producer, self.plan.rank, piece), self.plan.unit(self.plan.rank, piece)
        self.plan.add("wait", stream, peer=producer, channel=channel, chunk=(producer, piece), label="[partial]")
        return Region(self.plan.workspace, producer, unit, unit + 1)

    def pull(self, producer: int, piece: int) -> Region:
        """Copy such a chunk, once; return where it will be."""
        target = self.plan.here("stage", self.plan.unit(producer, piece))
        if (producer, piece) not in self.pulls:
            source = self.await_partial(self.plan.copy, producer, piece)
            self.pulls[producer, piece] = self.plan.pull((producer, piece), source, target)
        return target

    def reduce(self, piece: int, targets: list[Region]) -> int:
        """Add up a piece of this rank's part, in rank order, where its own partial sum was made; return the lane."""
        plan = self.plan
        lane = self.lane(plan.rank, plan.rank, piece)
        partials = {plan.rank: plan.here(plan.workspace, plan.unit(plan.rank, piece))}
        for producer in reversed(plan.peers):  # the order in which they come
            if self.direct:
                partials[producer] = self.await_partial(plan.compute[lane], producer, piece)
            else:
                partials[producer] = self.pull(producer, piece)
        after = [pull for (_, pulled), pull in self.pulls.items() if pulled == piece]
        reads = [partials[producer] for producer in range(plan.world)]
        plan.add("reduce", plan.compute[lane], reads=reads, writes=targets, after=after, chunk=(plan.rank, piece))
        return lane
