"""The fused all-gather-matmul: one persistent matmul whose tiles wait for the rows that they read.

This rank's own shard is multiplied first, in place. Meanwhile copies bring the peers' shards in the order rank+1,
rank+2, ..., and raise a flag for each chunk. Tiles are visited in the same order (`tile_order`), and wait for the flags
of the chunks that their rows touch. The products with several weights are placed side by side: each row of tiles goes
through all of them. Any number of rows, columns and contracted elements is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import triton
import triton.language as tl
from torch import Tensor

from .configuration import MOST_WEIGHTS, Configuration, are_aligned, configure, most_weights
from .device import (
    EPOCH,
    INTERPRETED,
    bound,
    chunk_of,
    gather_tile_rows,
    tile_row_count,
    visited,
    wait_for_flag,
)
from .factor import Factor, launches
from .flags import Flags
from .launch import described, epilogue, launch, strides
from .place import Machine, Place
from .tiles import (
    columns_of_tiles,
    finish_tile,
    multiply_described_tile,
    multiply_tile,
    pick,
    store_tile,
    weight_of,
    weight_strides,
)

__all__ = ["INTERPRETED", "all_gather_matmul", "all_gather_matmul_kernel"]


@triton.jit(do_not_specialize=["rank", "limit"])
def all_gather_matmul_kernel(  # type: ignore[no-untyped-def]
    own, gathered, weight0, weight1, weight2, weight3, products, ns, weight_ks, weight_ns,
    row_scale, row_step, scales, steps, biases, result_scales,
    flags, status, rank, total, rows, chunk_rows, chunks, k, limit: tl.int64,
    COUNT: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, RESCALED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TRANSPOSED: tl.constexpr, STRIDED: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr, CLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute ``product = all_gather(own) @ weight`` for each of ``COUNT`` weights, all in one launch.

    Args:
        own: (rows, k), contiguous: this rank's shard. With DESCRIPTORS, this argument, ``gathered`` and the weights (or
            their transposes if TRANSPOSED) are tensor descriptors.
        gathered: (total, k), contiguous. The rows of a peer are valid once the flags of their chunks are up. This
            rank's own rows are not read.
        weight0 to weight3: (k, n) each, with ``ns`` columns, and strides ``weight_ks`` and ``weight_ns``. They are
            separate arguments because Triton accepts no tensor descriptors in a tuple.
        products: (total, n) each, contiguous.
        row_scale, row_step, scales, steps, biases: see `tiles.finish_tile`; the last three are tuples with one item for
            each weight.
        result_scales: with RESCALED, one float32 number for each weight. The whole product is multiplied by it.
        flags, status, limit: see `device.wait_for_flag`. There is one flag for each chunk of each rank.
        total, rows, chunk_rows, chunks: see `place.Place`.
    """
    weights = (weight0, weight1, weight2, weight3)
    epoch = tl.load(status + EPOCH)
    tiles_n = columns_of_tiles(ns, COUNT, TILE_N)
    tile_rows = tile_row_count(rank, total, rows, TILE_M)
    for tile in tl.range(
        bound(tl.program_id(0), INTERPRETED),
        bound(tile_rows * tiles_n, INTERPRETED),
        bound(tl.num_programs(0), INTERPRETED),
    ):
        row, place = visited(tile, tile_rows, tiles_n, GROUP)
        start, stop = gather_tile_rows(row, rank, total, rows, TILE_M)
        which, first = weight_of(place, ns, COUNT, TILE_N)
        weight = pick(weights, which, COUNT)
        n = pick(ns, which, COUNT)
        column = (place - first) * TILE_N
        mine = start // rows == rank
        if not mine:
            last_row = tl.minimum(start + TILE_M, stop) - 1
            for chunk in tl.range(
                bound(chunk_of(start, rows, chunk_rows, chunks), INTERPRETED),
                bound(chunk_of(last_row, rows, chunk_rows, chunks) + 1, INTERPRETED),
            ):
                wait_for_flag(flags, status, chunk, epoch, limit, CLOCK, DESCRIPTORS)
        if DESCRIPTORS:
            # One loop for both sources, because two loops would each have separate buffers in shared memory.
            source = gathered
            row_of_source = start
            if mine:
                source = own
                row_of_source = start - rank * rows
            sums = multiply_described_tile(
                source, weight, row_of_source, column, k,
                TILE_M, TILE_N, TILE_K, TRANSPOSED, ACC, PRECISION, FAST, INTERPRETED,
            )  # fmt: skip
        else:
            source = gathered
            if mine:
                source = own - (rank * rows).to(tl.int64) * k
            weight_k, weight_n = weight_strides(weight_ks, weight_ns, which, COUNT, TRANSPOSED, STRIDED)
            sums = multiply_tile(
                source, weight, start, stop, column, n, k, k, 1, weight_k, weight_n,
                TILE_M, TILE_N, TILE_K, EVEN_K, ACC, PRECISION, FAST, INTERPRETED,
            )  # fmt: skip
        if SCALED or BIASED:
            sums = finish_tile(
                sums, start, stop, column, n, row_scale, row_step, scales, steps, biases, which,
                TILE_M, TILE_N, COUNT, SCALED, BIASED, ACC,
            )  # fmt: skip
        if RESCALED:
            sums *= tl.load(pick(result_scales, which, COUNT))
        store_tile(pick(products, which, COUNT), sums, start, stop, column, n, TILE_M, TILE_N, INTERPRETED)


def all_gather_matmul(
    own: Tensor,
    gathered: Tensor,
    factors: Sequence[Factor],
    flags: Flags,
    place: Place,
    machine: Machine,
    *,
    row_scale: Tensor | None = None,
    configuration: Configuration | None = None,
    ahead: Callable[..., None] | None = None,
) -> None:
    """Launch the kernel on the current stream, once for each group of similar factors; see `all_gather_matmul_kernel`.

    Args:
        row_scale: float32, the scale of the gathered rows: one number, or one for each row, contiguous; None: nothing
            is scaled.
        configuration: used in place of the one that `configure` chooses, for tests.
        ahead: see `launch.launch`. If given, nothing is launched.
    """
    if place.total == 0:
        return
    k = own.shape[1]
    for alike in launches(factors, most_weights(own.dtype, machine.architecture)):
        weights, products = [factor.weight for factor in alike], tuple(factor.product for factor in alike)
        aligned = are_aligned(own, gathered, *weights, *products)
        ns = tuple(weight.shape[1] for weight in weights)
        chosen = configuration or configure(
            place.rows, max(ns), k, own.dtype, machine.architecture,
            total=sum(ns), all_rows=place.total, aligned=aligned,
        )  # fmt: skip
        operands = described(chosen, (own, gathered), weights) if chosen.descriptors else (own, gathered, *weights)
        unused = [None] * (MOST_WEIGHTS - len(alike))
        scaling, constexprs = epilogue(alike, row_scale)
        rescaled = alike[0].result_scale is not None
        result_scales = tuple(factor.result_scale for factor in alike) if rescaled else None
        flagged = flags.words, flags.status
        launch(
            all_gather_matmul_kernel,
            machine,
            (*operands, *unused, products, ns, *strides(weights), *scaling, result_scales, *flagged, *place.numbers, k),
            flags,
            chosen,
            alike[0].weight,
            waits=True,
            ahead=ahead,
            **constexprs,
            COUNT=len(alike),
            RESCALED=rescaled,
        )
