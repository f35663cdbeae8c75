"""Planner: gather every rank's shard while one kernel multiplies. Its tiles wait for the rows that they read.

The copies are the same as in `all_gather_consume`, in the order of arrival. After each copy a flag is set. The kernel
visits this rank's own rows first, and then the rows of the others in the same order as the copies. World size 4, one
chunk a shard, rank 0::

    compute0  publish 0, signal 3 2 1 | tiles 0              | tiles 1              | tiles 2 | tiles 3
    copy                                wait 1, pull 1, raise | wait 2, pull 2, raise | wait 3, pull 3, raise

The steps ``tiles`` are one launch (`one_launch`). A flag, not an event, orders them after a ``raise``.

A plan's stream runs its steps in order, but a kernel's tiles may run in any order. So two plans are needed to verify
one kernel. Each program of the kernel visits its tiles in order and may wait at each of them: the plan with all tiles
on one stream shows that no program waits for ever. Tiles of different programs may run in any order: with ``apart``,
each group of tiles is on a stream of its own, and that plan shows that no two accesses race. Both plans are verified.
The first one is executed, simulated and drawn.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Plan
from .builder import CollectiveBuilder
from .gather import Gather, gather_buffers
from .kinds import RAISE, TILES


@lru_cache(maxsize=4096)
def fused_all_gather_matmul(
    rank: int,
    world: int,
    *,
    chunks: int = 1,
    stream: str = "compute0",
    copy: str = "copy",
    copies: int = 1,
    keep: bool = False,
    symmetric: bool = False,
    announce_offset: bool = True,
    apart: bool = False,
) -> Plan:
    """Return the plan of ``rank`` for ``Y = all_gather(X) @ B``.

    Args:
        rank, world: the rank that runs the plan, and the world size.
        chunks: the number of pieces into which a shard is cut; each has a flag.
        stream: the caller's stream, which launches the kernel.
        copy: the stream of the copies; it must not be ``stream``.
        copies: the number of streams of the copies, as in `CollectiveBuilder`.
        keep: the gathered tensor is an output.
        symmetric, announce_offset: peers can read the input itself, as in `all_gather_consume`.
        apart: put the tiles of each chunk on a stream of their own, for the proof that no two accesses race.

    Buffers, in chunks: "input" and "workspace" ``chunks``; "gathered" and "output" ``world * chunks``, ordered by rank;
    with ``symmetric``, "offset" 1 instead of "workspace". Without ``keep`` this rank's part of "gathered" is not used.

    Raises:
        ValueError: an argument is out of range.
    """
    if copy == stream:
        raise ValueError(f"copy is {copy!r}, the stream of the kernel that waits for the copies: use another name")
    buffers = gather_buffers(symmetric, keep, announce_offset)
    plan = CollectiveBuilder(
        "fused_all_gather_matmul", rank, world, chunks, (stream,), copy, buffers=buffers, inputs=chunks, copies=copies
    )
    gather = Gather(plan, streams=(stream,), in_place=False, symmetric=symmetric, announce_offset=announce_offset)
    if world > 1:
        gather.publish(stream)  # ahead of the kernel, which could delay every other rank
    # Copies are enqueued ahead of the kernel too. Otherwise it would wait for ever if both share a hardware queue.
    flags: dict[tuple[int, int], int] = {}
    copied: dict[str, tuple[int, int]] = {}  # for each copy stream, the chunk whose flag is next

    def set_flag(stream: str) -> None:
        if stream in copied:
            chunk = copied.pop(stream)
            flags[chunk] = plan.add(RAISE, stream, chunk=chunk, label="[here]")

    for owner in plan.peers:
        for piece in plan.pieces:
            # A flag is set right before the stream's next wait. Then one call of the driver can do both.
            set_flag(plan.copy_for(owner))
            gather.pull(owner, piece)
            copied[plan.copy_for(owner)] = owner, piece
    for each in list(copied):
        set_flag(each)
    for owner in [rank, *plan.peers]:
        for piece in plan.pieces:
            chunk, unit = (owner, piece), plan.unit(owner, piece)
            plan.add(
                TILES,
                f"{stream}.{unit}" if apart else stream,
                reads=[plan.here("input", piece) if owner == rank else plan.here("gathered", unit)],
                writes=[plan.here("output", unit)],
                after=[flags[chunk]] if owner != rank else (),
                chunk=chunk,
                label="[here]" if owner != rank else "",
            )
    if keep:
        gather.pull_own()
    if symmetric:
        gather.release_inputs()
    return plan.finish(
        plan.here("output", 0, world * chunks), *([plan.here("gathered", 0, world * chunks)] if keep else [])
    )
