"""The order in which a fused matmul visits the rows of its tiles, in plain Python.

The kernels compute the same order from the same numbers (`device.gather_tile_rows`, `device.scatter_tile_rows`), and
tests compare them with this module. The copies of a plan follow the order of arrival of the ranks, rank+1, rank+2, ...,
which is also the order of the rows here.

The rows of all ranks' parts are concatenated in rank order. Of the ``total`` rows, the last ranks may have fewer than
the others, or none. The rows are visited in *segments*, and each segment is cut into tiles from its own first row on. A
tile therefore never mixes this rank's rows with rows of other ranks, which are stored elsewhere. A tile of other ranks'
rows may cross the border between two ranks. The last tile of a segment may be short.
"""

from __future__ import annotations

from itertools import pairwise

from .place import Place


def gather_segments(rank: int, total: int, rows: int) -> tuple[tuple[int, int], ...]:
    """Return the segments of a gather: this rank's rows first, which need no copy; then the rows after them; then those
    before.
    """
    first, last = min(rank * rows, total), min((rank + 1) * rows, total)
    return (first, last), (last, total), (0, first)


def scatter_segments(rank: int, total: int, rows: int) -> tuple[tuple[int, int], ...]:
    """Return the segments of a scatter: the rows for the next rank first, and this rank's rows last. No peer waits for
    these.
    """
    own, behind, before = gather_segments(rank, total, rows)
    return behind, before, own


def tile_rows(segments: tuple[tuple[int, int], ...], tile_m: int) -> list[tuple[int, int]]:
    """Return, for each row of tiles in the order of visits, its first row and the one after its last row."""
    return [(start, min(start + tile_m, stop)) for first, stop in segments for start in range(first, stop, tile_m)]


def chunk_rows_of(place: Place) -> list[int]:
    """Return the number of rows of each chunk, by rank and then piece. The last ranks and pieces may have none."""
    found = []
    for rank in range(place.world):
        length = min(place.total, (rank + 1) * place.rows) - min(place.total, rank * place.rows)
        ends = [min(length, piece * place.chunk_rows) for piece in range(place.chunks + 1)]
        found += [stop - start for start, stop in pairwise(ends)]
    return found


def chunks_without_tiles(place: Place, n: int) -> list[int]:
    """Return the chunks whose flags no tile of a product with ``n`` columns raises, because there is none."""
    return [chunk for chunk, rows in enumerate(chunk_rows_of(place)) if rows == 0 or n == 0]
