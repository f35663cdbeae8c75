"""A kernel that records the rows of its tiles, with one program for each row of tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from symm_overlap.kernels.device import gather_tile_rows, scatter_tile_rows


@triton.jit
def note_rows(out, rank, total, rows, TILE_M: tl.constexpr, SCATTER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Set ``out[row]`` to (first row, row after the last) of the ``row``-th row of tiles."""
    row = tl.program_id(0)
    if SCATTER:
        start, stop = scatter_tile_rows(row, rank, total, rows, TILE_M)
    else:
        start, stop = gather_tile_rows(row, rank, total, rows, TILE_M)
    tl.store(out + 2 * row, start)
    tl.store(out + 2 * row + 1, tl.minimum(start + TILE_M, stop))
