"""Which rank holds which stage.

With 4 ranks and 8 stages::

    loop   rank 0: 0 4   rank 1: 1 5   rank 2: 2 6   rank 3: 3 7
    v      rank 0: 0 7   rank 1: 1 6   rank 2: 2 5   rank 3: 3 4
"""

from __future__ import annotations


def loop(ranks: int, stages: int) -> tuple[int, ...]:
    """Return the rank of each stage: stage s is on rank s modulo the number of ranks."""
    return tuple(stage % ranks for stage in range(stages))


def v(ranks: int, stages: int) -> tuple[int, ...]:
    """Return the rank of each stage: from the first rank to the last, back again, and so on.

    The two stages at a turn are neighbours on one rank, which passes values between them without a send.
    """
    there_and_back = (*range(ranks), *reversed(range(ranks)))
    return tuple(there_and_back[stage % (2 * ranks)] for stage in range(stages))
