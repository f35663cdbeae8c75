"""What the fused kernels have in common: flags between a kernel and the copies, tile order, and rounding.

A flag is a 32-bit epoch in this rank's own memory, one for each chunk of rows: it is up for a call once it has reached
the call's epoch. Flags are never reset. Before the flags of all chunks is a *status* line. Its first word is 0 while
all is well; whoever gives up, a wait past its limit or the host, changes it, and every wait then returns at once. The
results are garbage then, and whoever launched the kernel must look at that word.

All of it runs in Triton's interpreter too, where ``INTERPRETED`` stands for its two gaps: a dot product takes bfloat16
for integers, and conversion to bfloat16 drops bits instead of rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels of this process are interpreted."""

LINE = tl.constexpr(32)
"""32-bit words from one flag to the next, 128 bytes: a poll should not slow the writer of another flag."""

TIMED_OUT = tl.constexpr(1)
"""The status of a kernel whose wait passed its limit. Behind it: which chunk, the expected and the found epoch."""


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
    flags, counters, chunk, tiles_n, epoch, rank, rows, chunk_rows, chunks, TILE_M: tl.constexpr
):  # fmt: skip
    """Count a tile that is stored; raise the flag of its chunk if it was the last one.

    The counter is 0 again then, for the next call: nobody else counts any more.
    """
    owner, piece = chunk // chunks, chunk % chunks
    first = owner * rows + piece * chunk_rows
    behind = tl.minimum(first + chunk_rows, (owner + 1) * rows)
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
def gather_tile_rows(row, rank, world, rows, TILE_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(start, stop) of a row of tiles, in the order of `tile_order.gather_segments`; stop is that of the segment."""
    own, behind = ceil_div(rows, TILE_M), ceil_div((world - 1 - rank) * rows, TILE_M)
    start = rank * rows + row * TILE_M
    stop = rank * rows + rows
    if row >= own:
        start = (rank + 1) * rows + (row - own) * TILE_M
        stop = world * rows
    if row >= own + behind:
        start = (row - own - behind) * TILE_M
        stop = rank * rows
    return start, stop


@triton.jit
def scatter_tile_rows(row, rank, world, rows, TILE_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(start, stop) of a row of tiles, in the order of `tile_order.scatter_segments`; stop is that of the segment."""
    others = ceil_div((world - 1 - rank) * rows, TILE_M) + ceil_div(rank * rows, TILE_M)
    own = ceil_div(rows, TILE_M)
    return gather_tile_rows((row + own) % (own + others), rank, world, rows, TILE_M)


@triton.jit
def tile_row_count(rank, world, rows, TILE_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many rows of tiles there are."""
    behind, before = ceil_div((world - 1 - rank) * rows, TILE_M), ceil_div(rank * rows, TILE_M)
    return ceil_div(rows, TILE_M) + behind + before


@triton.jit
def multiply_tile(  # type: ignore[no-untyped-def]
    a, b, start, stop, column, n, k, a_m, a_k, b_k, b_n,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, EVEN_K: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``A[start:stop] @ B[:, column:]`` of one tile, in the accumulator's dtype.

    Rows from ``stop`` on repeat the last one: nobody stores them, and loads without a mask are quicker.
    """
    rows = tl.minimum(start + tl.arange(0, TILE_M), stop - 1).to(tl.int64)
    columns = column + tl.arange(0, TILE_N)
    steps = tl.arange(0, TILE_K)
    a_tile = a + rows[:, None] * a_m + steps[None, :].to(tl.int64) * a_k
    b_tile = b + steps[:, None].to(tl.int64) * b_k + columns[None, :].to(tl.int64) * b_n
    inside = columns[None, :] < n
    total = tl.full((TILE_M, TILE_N), 0.0, ACC)
    for at in tl.range(0, bound(k, INTERPRETED), TILE_K):
        if EVEN_K:
            x = tl.load(a_tile)
            y = tl.load(b_tile, mask=inside, other=0.0)
        else:
            x = tl.load(a_tile, mask=steps[None, :] < k - at, other=0.0)
            y = tl.load(b_tile, mask=(steps[:, None] < k - at) & inside, other=0.0)
        if INTERPRETED and x.dtype == tl.bfloat16:
            total = tl.dot(x.to(tl.float32), y.to(tl.float32), total, input_precision=PRECISION, out_dtype=ACC)
        else:
            total = tl.dot(x, y, total, input_precision=PRECISION, out_dtype=ACC)
        a_tile += TILE_K * a_k
        b_tile += TILE_K * b_k
    return total


@triton.jit
def multiply_described_tile(  # type: ignore[no-untyped-def]
    a, b, row, column, k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The same by tensor descriptors, of A and of B or, if TRANSPOSED, of B.t(). They load zeros outside a tensor.

    Rows behind the tile's last one are loaded too and may not have come yet: nobody stores what they make.
    """
    total = tl.full((TILE_M, TILE_N), 0.0, ACC)
    for at in tl.range(0, bound(k, INTERPRETED), TILE_K):
        x = a.load([row, at])
        y = b.load([column, at]).T if TRANSPOSED else b.load([at, column])
        if INTERPRETED and x.dtype == tl.bfloat16:
            total = tl.dot(x.to(tl.float32), y.to(tl.float32), total, input_precision=PRECISION, out_dtype=ACC)
        else:
            total = tl.dot(x, y, total, input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def store_tile(  # type: ignore[no-untyped-def]
    product, total, start, stop, column, n,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Round a tile to the product's dtype and store those of its rows and columns that exist."""
    rows = start + tl.arange(0, TILE_M)
    columns = column + tl.arange(0, TILE_N)
    if INTERPRETED and product.dtype.element_ty == tl.bfloat16:
        bits = total.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        total = tl.where(total == total, nearest.to(tl.float32, bitcast=True), total)
    tl.store(
        product + rows[:, None].to(tl.int64) * n + columns[None, :],
        total.to(product.dtype.element_ty),
        mask=(rows[:, None] < stop) & (columns[None, :] < n),
    )
