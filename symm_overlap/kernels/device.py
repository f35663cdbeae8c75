"""Functions shared by the fused kernels: flags between a kernel and the copies, and the order of tiles.

A flag is a 32-bit epoch in this rank's own memory. There is one for each chunk of rows. A flag is up for a call once it
has reached the call's epoch, so flags are never reset. Beside the flags is a *status* line. Its first word is 0 while
there is no failure. A wait that passes its limit, or the host when it gives up, changes the word, and then every wait
returns at once. The results are then garbage, and the code that launched the kernel must check that word. Another word
of the line is the call's epoch. It is in memory because a CUDA graph would repeat an argument, while every replay is a
separate call.

``INTERPRETED`` is for Triton's interpreter, which runs the same source.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels of this process run in Triton's interpreter."""

LINE = tl.constexpr(32)
"""32-bit words from one flag to the next (128 bytes), so that polling one flag does not slow the writer of another."""

EPOCH = tl.constexpr(4)
"""The index of the word of the status line that is the epoch of the call."""

TIMED_OUT = tl.constexpr(1)
"""The status after a kernel's wait passed its limit. The next words: the chunk, the expected and the found epoch."""

MISSED = tl.constexpr(5)
"""The index of the status word that is 1 after a wait of an interpreted kernel has returned without its flag."""


@triton.jit
def _poll(flag, status, chunk, epoch, limit, CLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return once a flag is up, or the wait has to end without it. The arguments are those of `wait_for_flag`."""
    waited = limit.to(tl.int64) * 0
    if CLOCK:
        begin = globaltimer()
    # Relaxed while polling: an acquire at each poll would delay the memory operations of the other warps.
    found = tl.atomic_add(flag, 0, sem="relaxed", scope="sys")
    over = tl.atomic_add(status, 0, sem="relaxed", scope="sys")
    while (found - epoch < 0) & (over == 0):
        if CLOCK:
            waited = globaltimer() - begin
        else:
            waited += 1
        # Each warp has its own time, so no branch may depend on it: warps that take different branches would meet in
        # different barriers. One thread carries out the atomic and the stores, by its own time, and all get its result.
        late = waited > limit
        over = tl.atomic_max(status, late.to(tl.int32) * TIMED_OUT, sem="relaxed", scope="sys")
        first = late & (over == 0)  # the first wait to give up writes what it waited for
        tl.store(status + 1, chunk, mask=first)
        tl.store(status + 2, epoch, mask=first)
        tl.store(status + 3, found, mask=first)
        found = tl.atomic_add(flag, 0, sem="relaxed", scope="sys")
    if not CLOCK:
        tl.store(status + MISSED, 1, mask=found - epoch < 0)
    # Adding 0 would become a load. The compiler drops a load with an unused result, and its acquire with it.
    tl.atomic_cas(flag, found, found, sem="acquire", scope="sys")


@triton.jit
def wait_for_flag(  # type: ignore[no-untyped-def]
    flags, status, chunk, epoch, limit, CLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr
):  # fmt: skip
    """Return once the flag of a chunk is up. Data written before the flag was raised is then visible to all threads.

    Args:
        epoch: int32, compared cyclically.
        limit: the limit of the wait, in nanoseconds with CLOCK, otherwise in polls.
        DESCRIPTORS: whether tensor descriptors load the chunk.
    """
    flag = flags + chunk * LINE
    # Each tile pays for this before its first loads. If the flag is up, it is one round trip to memory.
    if tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch < 0:
        _poll(flag, status, chunk, epoch, limit, CLOCK)
    tl.debug_barrier()  # one thread has polled; no other thread may read the chunk before this barrier
    if DESCRIPTORS and CLOCK:
        # Descriptors load through another path to memory (the asynchronous proxy), which the acquire does not order.
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def chunk_of(row, rows, chunk_rows, chunks):  # type: ignore[no-untyped-def]
    """Return the chunk of a row, if each rank's ``rows`` are cut into ``chunks`` of ``chunk_rows``."""
    return row // rows * chunks + row % rows // chunk_rows


@triton.jit
def tile_is_done(  # type: ignore[no-untyped-def]
    flags, counters, chunk, tiles_n, epoch, rank, total, rows, chunk_rows, chunks, TILE_M: tl.constexpr
):  # fmt: skip
    """Count a stored tile, and raise the flag of its chunk if it was the last tile of the chunk.

    The last tile also resets the counter to 0 for the next call, since no other tile counts any more.
    """
    owner, piece = chunk // chunks, chunk % chunks
    first = owner * rows + piece * chunk_rows
    behind = tl.minimum(tl.minimum(first + chunk_rows, (owner + 1) * rows), total)
    segment = tl.where(owner > rank, (rank + 1) * rows, tl.where(owner == rank, rank * rows, 0))
    rows_of_tiles = (behind - 1 - segment) // TILE_M - (first - segment) // TILE_M + 1
    # Acquire: the program that counts last has then seen the tiles of all others, and its flag publishes them.
    done = tl.atomic_add(counters + chunk, 1, sem="acq_rel", scope="gpu") + 1
    if done == rows_of_tiles * tiles_n:
        tl.store(counters + chunk, 0)
        tl.atomic_xchg(flags + chunk * LINE, epoch, sem="release", scope="sys")


@triton.jit
def bound(x, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``x`` as a loop bound: with NumPy 2.4, the interpreter of Triton 3.6 needs a Python number there."""
    if INTERPRETED:
        return x.handle.data.item()
    return x


@triton.jit
def ceil_div(a, b):  # type: ignore[no-untyped-def]
    """Return ``a / b``, rounded up."""
    return (a + b - 1) // b


@triton.jit
def visited(tile, tile_rows, tiles_n, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row and the column, in tiles, of the tile that is visited ``tile``-th."""
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    size = tl.minimum(tile_rows - first, GROUP)
    return first + tile % in_group % size, tile % in_group // size


@triton.jit
def row_segments(rank, total, rows, TILE_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where this rank's rows begin and end, and how many tile rows there are in them, after and before them."""
    first, last = tl.minimum(rank * rows, total), tl.minimum((rank + 1) * rows, total)
    return first, last, ceil_div(last - first, TILE_M), ceil_div(total - last, TILE_M), ceil_div(first, TILE_M)


@triton.jit
def gather_tile_rows(row, rank, total, rows, TILE_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (start, stop) of a row of tiles, in the order of `tile_order.gather_segments`; stop ends the segment."""
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
    """Return (start, stop) of a row of tiles, in the order of `tile_order.scatter_segments`; stop ends the segment."""
    _, _, own, behind, before = row_segments(rank, total, rows, TILE_M)
    return gather_tile_rows((row + own) % (own + behind + before), rank, total, rows, TILE_M)


@triton.jit
def tile_row_count(rank, total, rows, TILE_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of rows of tiles."""
    _, _, own, behind, before = row_segments(rank, total, rows, TILE_M)
    return own + behind + before
