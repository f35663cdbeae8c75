"""In which order a fused matmul visits the rows of its tiles, as plain Python.

The kernels compute the same from the same numbers (`device.gather_tile_rows`, `device.scatter_tile_rows`), and tests
hold them to what is here. The copies of a plan go by the ranks' order of arrival, rank+1, rank+2, ..., which is that of
the rows here.

All rows are those of every rank's part, in rank order; of ``total`` rows the last ranks may have fewer, or none. They
are visited in *segments*, each of which is cut into tiles from its own first row on. A tile therefore never mixes own
rows with others', which lie elsewhere in memory; among the others' rows it may cross the border between two ranks. The
last tile of a segment may be short.
"""

from __future__ import annotations

from itertools import pairwise

from .place import Place


def gather_segments(rank: int, total: int, rows: int) -> tuple[tuple[int, int], ...]:
    """The own rows first, which need no copy; then those behind them; then those before them."""
    first, last = min(rank * rows, total), min((rank + 1) * rows, total)
    return (first, last), (last, total), (0, first)


def scatter_segments(rank: int, total: int, rows: int) -> tuple[tuple[int, int], ...]:
    """The rows for the next rank first and the own ones last, which nobody waits for."""
    own, behind, before = gather_segments(rank, total, rows)
    return behind, before, own


def tile_rows(segments: tuple[tuple[int, int], ...], tile_m: int) -> list[tuple[int, int]]:
    """Of each row of tiles, in the order in which they are visited, the first row and the one behind the last."""
    return [(start, min(start + tile_m, stop)) for first, stop in segments for start in range(first, stop, tile_m)]


def chunk_rows_of(place: Place) -> list[int]:
    """How many rows each chunk has, by rank and then piece; the last ranks and pieces may have none."""
    found = []
    for rank in range(place.world):
        length = min(place.total, (rank + 1) * place.rows) - min(place.total, rank * place.rows)
        ends = [min(length, piece * place.chunk_rows) for piece in range(place.chunks + 1)]
        found += [stop - start for start, stop in pairwise(ends)]
    return found
