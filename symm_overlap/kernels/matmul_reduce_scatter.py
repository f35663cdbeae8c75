"""The fused matmul of a reduce-scatter or an all-reduce: one persistent matmul that announces which rows are done.

The rows for the next rank are computed first, and this rank's own rows last (`tile_order`). The last tile of a chunk
raises the chunk's flag. Copies wait for the flag and bring the chunk to its owner, while the kernel computes the next
one. Any number of rows, columns and contracted elements is allowed.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .configuration import Configuration, are_aligned, configure
from .device import (
    EPOCH,
    INTERPRETED,
    bound,
    ceil_div,
    chunk_of,
    scatter_tile_rows,
    tile_is_done,
    tile_row_count,
    visited,
)
from .factor import Factor
from .flags import Flags
from .launch import described, epilogue, launch
from .place import Machine, Place
from .tile_order import chunks_without_tiles
from .tiles import finish_tile, multiply_described_tile, multiply_tile, store_tile

__all__ = ["INTERPRETED", "matmul_reduce_scatter", "matmul_reduce_scatter_kernel"]


@triton.jit(do_not_specialize=["rank", "limit"])
def matmul_reduce_scatter_kernel(  # type: ignore[no-untyped-def]
    a, weight, product, a_m, a_k, weight_k, weight_n, row_scale, row_step, scales, steps, biases,
    flags, status, counters, rank, total, rows, chunk_rows, chunks, n, k, limit: tl.int64,
    SCALED: tl.constexpr, BIASED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TRANSPOSED: tl.constexpr, STRIDED: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr, CLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute ``product = a @ weight``, and raise a flag for each chunk of its rows once the chunk is stored.

    Args:
        a: (total, k), with strides ``a_m`` and ``a_k``: the rows for each rank, in rank order. With DESCRIPTORS, this
            argument and ``weight`` (or its transpose if TRANSPOSED) are tensor descriptors.
        weight: (k, n), with strides ``weight_k`` and ``weight_n``.
        product: (total, n), contiguous.
        row_scale, row_step, scales, steps, biases: see `tiles.finish_tile`.
        flags, status: see `device`. There is one flag for each chunk of each rank. Flags of empty chunks are not
            raised.
        counters: one for each chunk, initially 0.
        total, rows, chunk_rows, chunks: see `place.Place`.
        limit: not used, because the kernel does not wait.
    """
    epoch = tl.load(status + EPOCH)
    tiles_n = ceil_div(n, TILE_N)
    tile_rows = tile_row_count(rank, total, rows, TILE_M)
    for tile in tl.range(
        bound(tl.program_id(0), INTERPRETED),
        bound(tile_rows * tiles_n, INTERPRETED),
        bound(tl.num_programs(0), INTERPRETED),
    ):
        row, column = visited(tile, tile_rows, tiles_n, GROUP)
        start, stop = scatter_tile_rows(row, rank, total, rows, TILE_M)
        if DESCRIPTORS:
            sums = multiply_described_tile(
                a, weight, start, column * TILE_N, k,
                TILE_M, TILE_N, TILE_K, TRANSPOSED, ACC, PRECISION, FAST, INTERPRETED,
            )  # fmt: skip
        else:
            sums = multiply_tile(
                a, weight, start, stop, column * TILE_N, n, k, a_m, a_k, weight_k, weight_n,
                TILE_M, TILE_N, TILE_K, EVEN_K, ACC, PRECISION, FAST, INTERPRETED,
            )  # fmt: skip
        if SCALED or BIASED:
            sums = finish_tile(
                sums, start, stop, column * TILE_N, n, row_scale, row_step, scales, steps, biases, 0,
                TILE_M, TILE_N, 1, SCALED, BIASED, ACC,
            )  # fmt: skip
        store_tile(product, sums, start, stop, column * TILE_N, n, TILE_M, TILE_N, INTERPRETED)
        tl.debug_barrier()  # all threads have stored before one of them counts the tile
        last_row = tl.minimum(start + TILE_M, stop) - 1
        for chunk in tl.range(
            bound(chunk_of(start, rows, chunk_rows, chunks), INTERPRETED),
            bound(chunk_of(last_row, rows, chunk_rows, chunks) + 1, INTERPRETED),
        ):
            if chunk % chunks * chunk_rows < rows:  # it has rows
                tile_is_done(flags, counters, chunk, tiles_n, epoch, rank, total, rows, chunk_rows, chunks, TILE_M)


def matmul_reduce_scatter(
    a: Tensor,
    factor: Factor,
    flags: Flags,
    place: Place,
    machine: Machine,
    *,
    row_scale: Tensor | None = None,
    configuration: Configuration | None = None,
    ahead: Callable[..., None] | None = None,
) -> None:
    """Launch the kernel on the current stream; see `matmul_reduce_scatter_kernel`.

    Args:
        row_scale: float32, the scale of the rows of ``a``: one number, or one for each row, contiguous; None: nothing
            is scaled.
        configuration: used in place of the one that `configure` chooses, for tests.
        ahead: see `launch.launch`. If given, nothing is launched, and no flag is raised.
    """
    weight, product = factor.weight, factor.product
    k, n = weight.shape
    if ahead is None:
        for chunk in chunks_without_tiles(place, n):
            flags.up(chunk)
    if place.total == 0 or n == 0:
        return
    aligned = are_aligned(a, weight, product) and a.stride(1) == 1
    chosen = configuration or configure(
        place.rows, n, k, a.dtype, machine.architecture, all_rows=place.total, aligned=aligned
    )
    operands = described(chosen, (a,), [weight]) if chosen.descriptors else (a, weight)
    scaling, constexprs = epilogue([factor], row_scale)
    flagged = flags.words, flags.status, flags.counters
    launch(
        matmul_reduce_scatter_kernel,
        machine,
        (*operands, product, *a.stride(), *weight.stride(), *scaling, *flagged, *place.numbers, n, k),
        flags,
        chosen,
        weight,
        waits=False,
        ahead=ahead,
        **constexprs,
    )
