"""Where a fused kernel runs, and which rows belong to which rank."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Which rows belong to which rank.

    Attributes:
        rank: this rank.
        total: the number of rows of all ranks together.
        rows: the number of rows of a rank's part. The parts of the last ranks are shorter or empty if ``total`` is less
            than ``world * rows``.
        chunk_rows, chunks: the rows of a chunk, and the number of chunks, of a part; the last ones may be shorter or
            empty.
        world: the world size.
    """

    rank: int
    total: int
    rows: int
    chunk_rows: int
    chunks: int
    world: int

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """The arguments for kernels: rank, total, rows, chunk_rows, chunks."""
        return self[:5]


class Machine(NamedTuple):
    """The machine that kernels run on.

    Attributes:
        architecture: compute capability times 10; `INTERPRETER` on a CPU.
        multiprocessors: the number of multiprocessors. With 2, a persistent kernel has one program.
    """

    architecture: int
    multiprocessors: int
