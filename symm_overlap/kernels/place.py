"""Where a fused kernel runs, and whose rows are whose in it."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Whose rows are whose.

    Attributes:
        rank, world: of this rank.
        rows: of every rank's part.
        chunk_rows, chunks: how the rows of a part are cut; the last chunks may be short or empty.
    """

    rank: int
    world: int
    rows: int
    chunk_rows: int
    chunks: int


class Machine(NamedTuple):
    """What kernels run on.

    Attributes:
        architecture: compute capability times 10; `INTERPRETER` on a CPU.
        multiprocessors: how many there are; 2 stands for a persistent kernel of one program.
    """

    architecture: int
    multiprocessors: int
