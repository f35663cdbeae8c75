"""Where a fused kernel runs, and whose rows are whose in it."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Whose rows are whose.

    Attributes:
        rank: of this rank.
        total: rows of all ranks together.
        rows: of a rank's part. Those of the last ranks are shorter or empty where ``total`` is less than all parts.
        chunk_rows, chunks: how the rows of a part are cut; the last chunks may be short or empty.
        world: ranks.
    """

    rank: int
    total: int
    rows: int
    chunk_rows: int
    chunks: int
    world: int

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """What kernels are told: rank, total, rows, chunk_rows, chunks."""
        return self[:5]


class Machine(NamedTuple):
    """What kernels run on.

    Attributes:
        architecture: compute capability times 10; `INTERPRETER` on a CPU.
        multiprocessors: how many there are; 2 stands for a persistent kernel of one program.
    """

    architecture: int
    multiprocessors: int
