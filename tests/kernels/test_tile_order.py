"""The order of tiles: the rank's own rows come first (or last), the others in order of arrival, and every row once."""

from __future__ import annotations

import itertools

import pytest
import torch

from symm_overlap.kernels.tile_order import gather_segments, scatter_segments, tile_rows
from tests.kernels.interpreted import interpreting
from tests.ranks import Pool, Rank

CASES = [  # (rank, world, total, rows of a part, tile); in some cases, the last ranks have fewer rows, or none
    (rank, world, total, -(-total // world), tile)
    for world, rows, tile in itertools.product((1, 2, 3, 5), (1, 3, 16, 17, 40), (16, 32))
    for total in {world * rows, max(1, world * rows - world - 1)}
    for rank in range(world)
]


@pytest.mark.parametrize("segments", [gather_segments, scatter_segments])
def test_every_row_is_in_one_tile(segments: object) -> None:
    for rank, _, total, rows, tile in CASES:
        tiles = tile_rows(segments(rank, total, rows), tile)  # type: ignore[operator]
        assert sorted(row for start, stop in tiles for row in range(start, stop)) == list(range(total))


def owners(tiles: list[tuple[int, int]], rows: int) -> list[int]:
    """Return the ranks whose rows the tiles contain, in the order of their first rows."""
    return list(dict.fromkeys(row // rows for start, stop in tiles for row in range(start, stop)))


def test_own_rows_come_first_and_then_those_that_arrive_first() -> None:
    for rank, world, total, rows, tile in CASES:
        arrival = [each for step in range(world) if (each := (rank + step) % world) * rows < total]
        assert owners(tile_rows(gather_segments(rank, total, rows), tile), rows) == arrival
        last = [rank] if rank in arrival else []
        others = [each for each in arrival if each != rank]
        assert owners(tile_rows(scatter_segments(rank, total, rows), tile), rows) == [*others, *last]


def test_own_rows_share_no_tile_with_others() -> None:
    """In the gather, no tile has rows of this rank together with rows of another rank."""
    for rank, _, total, rows, tile in CASES:
        for start, stop in tile_rows(gather_segments(rank, total, rows), tile):
            assert start // rows == (stop - 1) // rows or rank not in range(start // rows, (stop - 1) // rows + 1)


def rows_by_kernel(me: Rank) -> None:
    with interpreting():
        from tests.kernels.row_order import note_rows

    for rank, _, total, rows, tile in CASES[::9]:  # the interpreter is slow
        for scatter, segments in enumerate((gather_segments, scatter_segments)):
            expected = tile_rows(segments(rank, total, rows), tile)
            out = torch.empty(len(expected), 2, dtype=torch.int32)
            note_rows[(len(expected),)](out, rank, total, rows, TILE_M=tile, SCATTER=bool(scatter))
            assert [tuple(each) for each in out.tolist()] == expected


def test_kernels_visit_rows_in_this_order(ranks: Pool) -> None:
    ranks.run(1, rows_by_kernel)
