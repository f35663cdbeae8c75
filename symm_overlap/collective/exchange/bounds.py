"""How rows are shared out: among ranks, and among the pieces of a rank's part."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def bounds(total: int, parts: int, multiple: int = 1) -> tuple[int, ...]:
    """Where ``parts`` consecutive parts of ``total`` rows begin and end: part i is rows ``bounds[i]`` to
    ``bounds[i + 1]``. Each begins at a multiple of ``multiple``; the last ones may be short or empty.
    """
    size = -(-total // (parts * multiple)) * multiple
    return tuple(min(total, part * size) for part in range(parts + 1))


def element_bounds(numel: int, parts: int, itemsize: int) -> tuple[int, ...]:
    """The same of elements, of so many bytes each, with parts that can be read in vectors of 16 bytes."""
    return bounds(numel, parts, 16 // itemsize)


def piece_rows(cut: tuple[int, ...], length: int, piece: int) -> int:
    """Rows of a piece of a part that has ``length`` rows, where full parts are cut at ``cut``."""
    return min(length, cut[piece + 1]) - min(length, cut[piece])
