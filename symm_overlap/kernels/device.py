"""What the fused kernels have in common: flags between a kernel and the copies, and the order of tiles.

A flag is a 32-bit epoch in this rank's own memory, one for each chunk of rows: it is up for a call once it has reached
the call's epoch. Flags are never reset. Beside the flags is a *status* line. Its first word is 0 while all is well;
whoever gives up, a wait past its limit or the host, changes it, and every wait then returns at once. The results are
garbage then, and whoever launched the kernel must look at that word. Another word of it is the call's epoch: in memory,
because a CUDA graph would repeat an argument, while every replay is a call of its own.

``INTERPRETED`` is for Triton's interpreter, which runs the same source.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels of this process are interpreted."""

LINE = tl.constexpr(32)
"""32-bit words from one flag to the next, 128 bytes: a poll should not slow the writer of another flag."""

EPOCH = tl.constexpr(4)
"""Which word of the status line is the epoch of the call."""

TIMED_OUT = tl.constexpr(1)
"""The status of a kernel whose wait passed its limit. Behind it: which chunk, the expected and the found epoch."""

MISSED = tl.constexpr(5)
"""Which word of the status line is 1 once a wait of a kernel in the interpreter has returned without its flag."""

CALL = tl.constexpr(6)
"""Which word of the status line says which call it is, by a number of the host's; of the first call that failed, if one
has: later ones leave it."""


@triton.jit
def wait_for_flag(  # type: ignore[no-untyped-def]
    flags, status, chunk, epoch, limit, CLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr
):  # fmt: skip
    """Return once the flag of a chunk is up: what was written before it was raised is then visible to all threads.

    Args:
        epoch: int32, compared cyclically.
        limit: nanoseconds with CLOCK, polls without.
        DESCRIPTORS: tensor descriptors load the chunk.
    """
    flag = flags + chunk * LINE
    waited = limit.to(tl.int64) * 0
    if CLOCK:
        begin = globaltimer()
    # Relaxed while it polls: an acquire each time would hold up the memory operations of the other warps.
    found = tl.atomic_add(flag, 0, sem="relaxed", scope="sys")
    over = tl.atomic_add(status, 0, sem="relaxed", scope="sys")
    while (found - epoch < 0) & (over == 0):
        if CLOCK:
            waited = globaltimer() - begin
        else:
            waited += 1
        if waited > limit:
            over = tl.atomic_cas(status, 0, TIMED_OUT, sem="acq_rel", scope="sys")
            if over == 0:  # the first wait to give up says what it waited for
                tl.store(status + 1, chunk)
                tl.store(status + 2, epoch)
                tl.store(status + 3, found)
            over = over * 0 + TIMED_OUT
        else:
            found = tl.atomic_add(flag, 0, sem="relaxed", scope="sys")
            over = tl.atomic_add(status, 0, sem="relaxed", scope="sys")
    if not CLOCK:
        tl.store(status + MISSED, 1, mask=found - epoch < 0)
    # To add 0 would be a load, and one whose result nobody uses is left out by the compiler, with its acquire.
    tl.atomic_cas(flag, found, found, sem="acquire", scope="sys")
    tl.debug_barrier()  # one thread has polled; no other one may read the chunk before this
    if DESCRIPTORS and CLOCK:
        # They load by another road to memory (the asynchronous proxy), which the acquire does not order.
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def chunk_of(row, rows, chunk_rows, chunks):  # type: ignore[no-untyped-def]
    """The chunk that a row is in, where each rank's ``rows`` are cut into ``chunks`` of ``chunk_rows``."""
    return row // rows * chunks + row % rows // chunk_rows


@triton.jit
def tile_is_done(  # type: ignore[no-untyped-def]
    flags, counters, chunk, tiles_n, epoch, rank, total, rows, chunk_rows, chunks, TILE_M: tl.constexpr
):  # fmt: skip
    """Count a tile that is stored; raise the flag of its chunk if it was the last one.

    The counter is 0 again then, for the next call: nobody else counts any more.
    """
    owner, piece = chunk // chunks, chunk % chunks
    first = owner * rows + piece * chunk_rows
    behind = tl.minimum(tl.minimum(first + chunk_rows, (owner + 1) * rows), total)
    segment = tl.where(owner > rank, (rank + 1) * rows, tl.where(owner == rank, rank * rows, 0))
    rows_of_tiles = (behind - 1 - segment) // TILE_M - (first - segment) // TILE_M + 1
    # Acquire: whoever counts last has seen the tiles of all others, and passes them on by the flag.
    done = tl.atomic_add(counters + chunk, 1, sem="acq_rel", scope="gpu") + 1
    if done == rows_of_tiles * tiles_n:
        tl.store(counters + chunk, 0)
        tl.atomic_xchg(flags + chunk * LINE, epoch, sem="release", scope="sys")


@triton.jit
def bound(x, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """``x`` for a bound of a loop: the interpreter of Triton 3.6 needs a number of Python's there, with NumPy 2.4."""
    if INTERPRETED:
        return x.handle.data.item()
    return x


@triton.jit
def ceil_div(a, b):  # type: ignore[no-untyped-def]
    """``a / b``, rounded up."""
    return (a + b - 1) // b


@triton.jit
def visited(tile, tile_rows, tiles_n, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of tiles and the column of tiles that come ``tile``-th."""
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    size = tl.minimum(tile_rows - first, GROUP)
    return first + tile % in_group % size, tile % in_group // size


@triton.jit
def row_segments(rank, total, rows, TILE_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the own rows begin and end, and how many rows of tiles the own rows, those behind and those before have."""
    first, last = tl.minimum(rank * rows, total), tl.minimum((rank + 1) * rows, total)
    return first, last, ceil_div(last - first, TILE_M), ceil_div(total - last, TILE_M), ceil_div(first, TILE_M)


@triton.jit
def gather_tile_rows(row, rank, total, rows, TILE_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(start, stop) of a row of tiles, in the order of `tile_order.gather_segments`; stop is that of the segment."""
    first, last, own, behind, _ = row_segments(rank, total, rows, TILE_M)
    start = first + row * TILE_M
    stop = last
    if row >= own:
        start = last + (row - own) * TILE_M
        stop = total
    if row >= own + behind:
        start = (row - own - behind) * TILE_M
        stop = first
    return start, stop


@triton.jit
def scatter_tile_rows(row, rank, total, rows, TILE_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(start, stop) of a row of tiles, in the order of `tile_order.scatter_segments`; stop is that of the segment."""
    _, _, own, behind, before = row_segments(rank, total, rows, TILE_M)
    return gather_tile_rows((row + own) % (own + behind + before), rank, total, rows, TILE_M)


@triton.jit
def tile_row_count(rank, total, rows, TILE_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many rows of tiles there are."""
    _, _, own, behind, before = row_segments(rank, total, rows, TILE_M)
    return own + behind + before
