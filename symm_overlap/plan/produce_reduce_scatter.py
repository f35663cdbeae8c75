"""Planner: compute a partial result for every rank, and sum what all ranks computed for this one.

The chunks of rank+1 are produced first and the own ones last, so that every chunk but the own travels behind a
matmul. Two compute streams take turns, the last one first: the caller's stream sleeps for a moment ahead of its first
chunk, so that every
rank starts in the same order and none waits for another at each step. World size 4, one chunk, rank 0::

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
        sleep: with two compute streams, make the last one start first on every rank.

    Buffers, in chunks: "input", "workspace{parity}" ``world * chunks``, ordered by the rank a chunk is for; "stage"
    ``world * chunks``, ordered by the rank a chunk is from, the own part unused; "output" ``chunks``.

    Raises:
        ValueError: an argument is out of range.
    """
    plan = Builder("produce_reduce_scatter", rank, world, chunks, compute, copy, parity, inputs=world * chunks)
    produce_and_reduce(plan, direct, sleep)
    return plan.finish(plan.here("output", 0, chunks))


def produce_and_reduce(plan: Builder, direct: bool, sleep: bool, all_reduce: bool = False) -> list[int]:
    """Add the steps up to the reductions; return the lane (index of compute stream) of each piece's reduction.

    A reduction writes its piece of "output"; with ``all_reduce``, this rank's part of "output", and "reduced", which
    peers read.
    """
    rank, compute = plan.rank, plan.compute

    def lane(producer: int, owner: int, piece: int) -> int:
        """Which compute stream of ``producer`` produces this chunk: both ends of a signal must agree on it."""
        return (len(compute) - 1 - plan.unit((owner - producer - 1) % plan.world, piece)) % len(compute)

    def await_partial(stream: str, producer: int, piece: int) -> Region:
        """Wait for a chunk of mine; return where it lies."""
        channel = lane(producer, rank, piece)
        plan.add("wait", stream, peer=producer, channel=channel, chunk=(producer, piece), label="[partial]")
        unit = plan.unit(rank, piece)
        return Region(plan.workspace, producer, unit, unit + 1)

    pulls: dict[tuple[int, int], int] = {}

    def pull(producer: int, piece: int) -> None:
        source = await_partial(plan.copy, producer, piece)
        pulls[producer, piece] = plan.pull((producer, piece), source, plan.here("stage", plan.unit(producer, piece)))

    sleeps = sleep and len(compute) == 2
    for owner in [*plan.peers, rank]:
        arriving = (2 * rank - owner) % plan.world  # while I work for rank+1, rank-1 works for me
        for piece in plan.pieces:
            index = lane(rank, owner, piece)
            if sleeps and index == 0:
                plan.add("sleep", compute[0])
                sleeps = False
            unit = plan.unit(owner, piece)
            source, target = plan.here("input", unit), plan.here(plan.workspace, unit)
            plan.add("produce", compute[index], reads=[source], writes=[target], chunk=(owner, piece))
            if owner == rank:
                continue
            plan.add("signal", compute[index], peer=owner, channel=index, chunk=(owner, piece), label="[partial]")
            if not direct and not plan.merged:
                pull(arriving, piece)

    lanes = [lane(rank, rank, piece) for piece in plan.pieces]  # where the own partial was produced, its sum is reduced
    for piece, index in enumerate(lanes):
        own = plan.unit(rank, piece)
        partials = {rank: plan.here(plan.workspace, own)}
        after = []
        for producer in reversed(plan.peers):
            if direct:
                partials[producer] = await_partial(compute[index], producer, piece)
                continue
            if plan.merged:
                pull(producer, piece)
            partials[producer] = plan.here("stage", plan.unit(producer, piece))
            after.append(pulls[producer, piece])
        reads = [partials[producer] for producer in range(plan.world)]
        writes = [plan.here("output", own), plan.here("reduced", piece)] if all_reduce else [plan.here("output", piece)]
        plan.add("reduce", compute[index], reads=reads, writes=writes, after=after, chunk=(rank, piece))
        for peer in reversed(plan.peers) if all_reduce else ():
            plan.add("signal", compute[index], peer=peer, channel=2 + index, chunk=(rank, piece), label="[reduced]")
    return lanes
