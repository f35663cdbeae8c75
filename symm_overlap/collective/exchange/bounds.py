"""How rows are divided among ranks, and among the pieces of a rank's part."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def bounds(total: int, parts: int, multiple: int = 1) -> tuple[int, ...]:
    """Return where ``parts`` consecutive parts of ``total`` rows begin and end.

    Part i is rows ``bounds[i]`` to ``bounds[i + 1]``. Each part begins at a multiple of ``multiple`` or at ``total``.
    The last parts may be short or empty.
    """
    size = -(-total // (parts * multiple)) * multiple
    return tuple(min(total, part * size) for part in range(parts + 1))


def element_bounds(numel: int, parts: int, itemsize: int) -> tuple[int, ...]:
    """Return the `bounds` of parts of ``numel`` elements, where each part can be read in vectors of 16 bytes."""
    return bounds(numel, parts, 16 // itemsize)


def piece_rows(cut: tuple[int, ...], length: int, piece: int) -> int:
    """Return how many rows a piece of a part of ``length`` rows has. ``cut`` has the pieces' bounds in a full part."""
    return min(length, cut[piece + 1]) - min(length, cut[piece])
