"""The fused all-gather-matmul: one persistent matmul whose tiles wait for the rows that they read.

The own shard is multiplied first, where it lies. Meanwhile copies bring the peers' shards in the order rank+1, rank+2,
..., and raise a flag for each chunk; tiles are visited in the same order (`tile_order`), and wait for the flags of the
chunks that their rows touch. Any number of rows, columns and contracted elements will do.
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
    gather_tile_rows,
    multiply_described_tile,
    multiply_tile,
    store_tile,
    tile_row_count,
    visited,
    wait_for_flag,
)
from .flags import Flags
from .launch import described, is_transposed, launch
from .place import Machine, Place

__all__ = ["INTERPRETED", "all_gather_matmul", "all_gather_matmul_kernel"]


@triton.jit(do_not_specialize=["rank", "epoch", "limit"])
def all_gather_matmul_kernel(  # type: ignore[no-untyped-def]
    own, gathered, weight, product, flags, status,
    rank, world, rows, chunk_rows, chunks, n, k, weight_k, weight_n, epoch, limit,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, CLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``product = all_gather(own) @ weight``, all of it in one launch.

    Args:
        own: (rows, k), contiguous: this rank's shard.
            With DESCRIPTORS this, ``gathered`` and ``weight``, or its transpose if TRANSPOSED, are tensor descriptors.
        gathered: (world * rows, k), contiguous. Rows of a peer are there once the flags of their chunks are up; the own
            ones are not read.
        weight: (k, n), with strides ``weight_k`` and ``weight_n``.
        product: (world * rows, n), contiguous.
        flags, status, epoch, limit: see `device.wait_for_flag`; a flag for each of ``world * chunks`` chunks.
        chunk_rows, chunks: how the rows of every rank are cut.
    """
    tiles_n = ceil_div(n, TILE_N)
    tile_rows = tile_row_count(rank, world, rows, TILE_M)
    for tile in tl.range(
        bound(tl.program_id(0), INTERPRETED),
        bound(tile_rows * tiles_n, INTERPRETED),
        bound(tl.num_programs(0), INTERPRETED),
    ):
        row, column = visited(tile, tile_rows, tiles_n, GROUP)
        start, stop = gather_tile_rows(row, rank, world, rows, TILE_M)
        mine = start // rows == rank
        if not mine:
            last_row = tl.minimum(start + TILE_M, stop) - 1
            for chunk in tl.range(
                bound(chunk_of(start, rows, chunk_rows, chunks), INTERPRETED),
                bound(chunk_of(last_row, rows, chunk_rows, chunks) + 1, INTERPRETED),
            ):
                wait_for_flag(flags, status, chunk, epoch, limit, CLOCK, DESCRIPTORS)
        if DESCRIPTORS:
            # One loop for both, or each would have buffers of its own in shared memory.
            source = gathered
            row_of_source = start
            if mine:
                source = own
                row_of_source = start - rank * rows
            total = multiply_described_tile(
                source, weight, row_of_source, column * TILE_N, k,
                TILE_M, TILE_N, TILE_K, TRANSPOSED, ACC, PRECISION, INTERPRETED,
            )  # fmt: skip
        else:
            source = gathered
            if mine:
                source = own - (rank * rows).to(tl.int64) * k
            total = multiply_tile(
                source, weight, start, stop, column * TILE_N, n, k, k, 1, weight_k, weight_n,
                TILE_M, TILE_N, TILE_K, EVEN_K, ACC, PRECISION, INTERPRETED,
            )  # fmt: skip
        store_tile(product, total, start, stop, column * TILE_N, n, TILE_M, TILE_N, INTERPRETED)


def all_gather_matmul(
    own: Tensor,
    gathered: Tensor,
    weight: Tensor,
    product: Tensor,
    flags: Flags,
    place: Place,
    machine: Machine,
    *,
    configuration: Configuration | None = None,
) -> None:
    """Launch the kernel on the current stream; see `all_gather_matmul_kernel`.

    Args:
        configuration: in place of the one that `configure` chooses, for tests.
    """
    n, k = weight.shape[1], weight.shape[0]
    if place.rows == 0 or n == 0:
        return
    aligned = are_aligned(own, gathered, weight)
    chosen = configuration or configure(place.rows, n, k, own.dtype, machine.architecture, aligned=aligned)
    operands = described(chosen, (own, gathered), weight) if chosen.descriptors else (own, gathered, weight)
    launch(
        all_gather_matmul_kernel,
        machine,
        (*operands, product, flags.words, flags.status, *place, n, k, *weight.stride()),
        flags,
        chosen,
        own.dtype,
        k,
        TRANSPOSED=is_transposed(weight),
    )
