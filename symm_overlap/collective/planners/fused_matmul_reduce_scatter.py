"""Planner: one kernel computes a partial result for every rank, and copies take each chunk away once it is made.

The kernel makes the rows for rank+1 first and the own ones last. The last tile of a chunk raises its flag, the copy
stream pushes the chunk into the memory of its owner and tells it, and the owner sums, in rank order, as soon as it has
all parts of a chunk. World size 4, one chunk, rank 0::

    compute0  tiles 1 | tiles 2               | tiles 3               | tiles 0
    copy              | poll 1, push 1, signal | poll 2, push 2, signal | poll 3, push 3, signal
    reduce                                                  wait 1 2 3, poll 0, reduce

The steps ``tiles`` are one launch; `fused_all_gather_matmul` says what that means, and what ``apart`` is for.

A peer's memory is written only once that peer has read what was there. It is in the half of the workspace that the
call before the last one used: in between, every rank has been signalled by every other one, after that call.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Life, Plan, Region
from .builder import CollectiveBuilder
from .kinds import POLL, PUSH, REDUCE, TILES


@lru_cache(maxsize=4096)
def fused_matmul_reduce_scatter(
    rank: int,
    world: int,
    *,
    chunks: int = 1,
    stream: str = "compute0",
    copy: str = "copy",
    sums: str = "reduce",
    apart: bool = False,
) -> Plan:
    """The plan of ``rank`` for ``Y = reduce_scatter(X @ B)``.

    Args:
        chunks: pieces the part of each rank is cut into; each has a flag.
        stream: the caller's stream, which launches the kernel.
        copy, sums: the streams of the copies and of the sums, three different ones.
        apart: see `fused_all_gather_matmul`.

    Buffers, in chunks: "input" and "product" ``world * chunks``, ordered by the rank a chunk is for; "workspace"
    ``world * chunks``, ordered by the rank a chunk is from, the own part unused; "output" ``chunks``.

    Raises:
        ValueError: an argument is out of range.
    """
    if len({stream, copy, sums}) < 3:
        raise ValueError(
            f"the streams are {stream!r}, {copy!r} and {sums!r}: the kernel, copies and sums take one each"
        )
    buffers = {
        "input": Life.INPUT,
        "workspace": Life.CALL,
        "product": Life.SCRATCH,
        "output": Life.OUTPUT,
    }
    plan = CollectiveBuilder(
        "fused_matmul_reduce_scatter", rank, world, chunks, (stream,), copy, buffers=buffers, inputs=world * chunks
    )
    made = {}
    for owner in [*plan.peers, rank]:
        for piece in plan.pieces:
            unit = plan.unit(owner, piece)
            made[owner, piece] = plan.add(
                TILES,
                f"{stream}.{unit}" if apart else stream,
                reads=[plan.here("input", unit)],
                writes=[plan.here("product", unit)],
                chunk=(owner, piece),
                label="[made]",
            )
    for chunk in made:
        owner, piece = chunk
        if owner != rank:
            plan.add(POLL, copy, after=[made[chunk]], chunk=chunk, label="[made]")
            unit = plan.unit(rank, piece)
            source, target = plan.here("product", plan.unit(*chunk)), Region("workspace", owner, unit, unit + 1)
            plan.add(PUSH, copy, reads=[source], writes=[target], peers=(owner,), chunk=chunk)
            plan.add("signal", copy, peers=(owner,), channel=0, chunk=chunk, label="[partial]")
    for piece in plan.pieces:
        partials = {each: plan.here("workspace", plan.unit(each, piece)) for each in plan.peers}
        partials[rank] = plan.here("product", plan.unit(rank, piece))
        plan.wait(sums, plan.peers, channel=0, chunk=(rank, piece), label="[partial]")
        plan.add(POLL, sums, after=[made[rank, piece]], chunk=(rank, piece), label="[made]")
        reads = [partials[producer] for producer in range(world)]
        plan.add(REDUCE, sums, reads=reads, writes=[plan.here("output", piece)], chunk=(rank, piece))
    return plan.finish(plan.here("output", 0, chunks))
