"""The fused matmul of a reduce-scatter: one persistent matmul that tells which rows it has made.

The rows for the next rank are made first and the own ones last (`tile_order`). The last tile of a chunk raises the
chunk's flag; copies that wait for it take the chunk to its owner, while the kernel makes the next one. Any number of
rows, columns and contracted elements will do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .configuration import Configuration, are_aligned, configure
from .device import (
    INTERPRETED,
    bound,
    ceil_div,
    chunk_of,
    multiply_described_tile,
    multiply_tile,
    scatter_tile_rows,
    store_tile,
    tile_is_done,
    tile_row_count,
    visited,
)
from .flags import Flags
from .launch import described, is_transposed, launch
from .place import Machine, Place
from .tile_order import chunk_rows_of

__all__ = ["INTERPRETED", "matmul_reduce_scatter", "matmul_reduce_scatter_kernel"]


@triton.jit(do_not_specialize=["rank", "epoch", "limit"])
def matmul_reduce_scatter_kernel(  # type: ignore[no-untyped-def]
    a, weight, product, flags, counters,
    rank, world, rows, chunk_rows, chunks, n, k, a_m, a_k, weight_k, weight_n, epoch, limit,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, CLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``product = a @ weight``, and a flag for each chunk of its rows once they are there.

    Args:
        a: (world * rows, k), with strides ``a_m`` and ``a_k``: what is for each rank, in rank order. With DESCRIPTORS
            this and ``weight``, or its transpose if TRANSPOSED, are tensor descriptors.
        weight: (k, n), with strides ``weight_k`` and ``weight_n``.
        product: (world * rows, n), contiguous.
        flags, epoch: see `device`; a flag for each of ``world * chunks`` chunks, of which empty ones are not raised.
        counters: for each chunk, 0.
        chunk_rows, chunks: how the rows for every rank are cut.
        limit: not used, as the kernel waits for nobody.
    """
    tiles_n = ceil_div(n, TILE_N)
    tile_rows = tile_row_count(rank, world, rows, TILE_M)
    for tile in tl.range(
        bound(tl.program_id(0), INTERPRETED),
        bound(tile_rows * tiles_n, INTERPRETED),
        bound(tl.num_programs(0), INTERPRETED),
    ):
        row, column = visited(tile, tile_rows, tiles_n, GROUP)
        start, stop = scatter_tile_rows(row, rank, world, rows, TILE_M)
        if DESCRIPTORS:
            total = multiply_described_tile(
                a, weight, start, column * TILE_N, k,
                TILE_M, TILE_N, TILE_K, TRANSPOSED, ACC, PRECISION, INTERPRETED,
            )  # fmt: skip
        else:
            total = multiply_tile(
                a, weight, start, stop, column * TILE_N, n, k, a_m, a_k, weight_k, weight_n,
                TILE_M, TILE_N, TILE_K, EVEN_K, ACC, PRECISION, INTERPRETED,
            )  # fmt: skip
        store_tile(product, total, start, stop, column * TILE_N, n, TILE_M, TILE_N, INTERPRETED)
        tl.debug_barrier()  # all threads have stored; then one of them counts
        last_row = tl.minimum(start + TILE_M, stop) - 1
        for chunk in tl.range(
            bound(chunk_of(start, rows, chunk_rows, chunks), INTERPRETED),
            bound(chunk_of(last_row, rows, chunk_rows, chunks) + 1, INTERPRETED),
        ):
            if chunk % chunks * chunk_rows < rows:  # it has rows
                tile_is_done(flags, counters, chunk, tiles_n, epoch, rank, rows, chunk_rows, chunks, TILE_M)


def matmul_reduce_scatter(
    a: Tensor,
    weight: Tensor,
    product: Tensor,
    flags: Flags,
    place: Place,
    machine: Machine,
    *,
    configuration: Configuration | None = None,
) -> None:
    """Launch the kernel on the current stream; see `matmul_reduce_scatter_kernel`.

    Args:
        configuration: in place of the one that `configure` chooses, for tests.
    """
    k, n = weight.shape
    for chunk, rows in enumerate(chunk_rows_of(place)):
        if rows == 0 or n == 0:  # no tile raises it
            flags.up(chunk)
    if place.rows == 0 or n == 0:
        return
    aligned = are_aligned(a, weight) and a.stride(1) == 1
    chosen = configuration or configure(place.rows, n, k, a.dtype, machine.architecture, aligned=aligned)
    operands = described(chosen, (a,), weight) if chosen.descriptors else (a, weight)
    launch(
        matmul_reduce_scatter_kernel,
        machine,
        (*operands, product, flags.words, flags.counters, *place, n, k, *a.stride(), *weight.stride()),
        flags,
        chosen,
        a.dtype,
        k,
        TRANSPOSED=is_transposed(weight),
    )
