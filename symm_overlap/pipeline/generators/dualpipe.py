"""DualPipe and DualPipeV: forwards and backwards of two streams of microbatches, run together in pairs.

A rank has two chunks. Chunk 0 is the stage that its microbatches enter first. In the main part, each action is a pair
of a forward and a full backward: (F0;B1) and (F1;B0) in turn. So the communication inside one of the two, such as the
all-to-all of a mixture of experts, overlaps with the computation of the other. In DualPipe, microbatches enter from
both ends, and every stage exists twice. In DualPipeV, both chunks are stages of one pipeline in a V.

The order is that of DeepSeek (DeepSeek-V3 technical report, 2024, and the page of the DualPipe project).
"""

from __future__ import annotations

from ..placement import loop, v
from ..schedule import Row, Schedule
from .arguments import require, require_microbatches, require_two_stages
from .two_chunks import RowOfTwo


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Return DualPipe: two pipelines of ``ranks`` stages on the same ranks, the second in reverse order.

    Each pipeline runs half of the microbatches. Stage ``ranks + s`` has the parameters of stage s. So a rank holds two
    stages, and the two ranks that hold the same stages sum their gradients.

    Raises:
        TypeError, ValueError: an argument is not a positive integer, the number of ranks or of microbatches is odd, or
            there are fewer than two microbatches a rank.
    """
    require("DualPipe", ranks=ranks, microbatches=microbatches)
    if ranks % 2:
        raise ValueError(
            f"DualPipe: ranks make pairs that hold the same two stages, and {ranks} is odd; the nearest that work are "
            f"{', '.join(str(each) for each in (ranks - 1, ranks + 1) if each)}"
        )
    require_microbatches(
        "DualPipe",
        microbatches,
        f"the two pipelines need an equal share of at least {ranks} microbatches each",
        lambda count: count % 2 == 0 and count >= 2 * ranks,
    )
    half, share = ranks // 2, microbatches // 2
    rows = []
    for rank in range(ranks):
        here = ((rank, 0), (2 * ranks - 1 - rank, share))  # for each pipeline, its stage and its first microbatch
        (stage0, first0), (stage1, first1) = here if rank < half else here[::-1]
        row = RowOfTwo((stage0, stage1), (first0, first1))
        rows.append(_row(row, min(rank, ranks - 1 - rank), half, share, microbatches))
    return Schedule(tuple(rows), (*loop(ranks, ranks), *reversed(range(ranks))), microbatches, pipelines=2)


def dualpipev(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return DualPipeV: two stages a rank, in a V.

    Raises:
        TypeError, ValueError: an argument is not a positive integer, ``stages_per_rank`` is not 2, or there are fewer
            microbatches than stages.
    """
    require("DualPipeV", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    require_two_stages("DualPipeV", stages_per_rank)
    require_microbatches(
        "DualPipeV",
        microbatches,
        f"there must be at least as many microbatches as stages, which are {2 * ranks}",
        lambda count: count >= 2 * ranks,
    )
    rows = [
        _row(RowOfTwo((rank, 2 * ranks - 1 - rank)), rank, ranks, microbatches, microbatches) for rank in range(ranks)
    ]
    return Schedule(tuple(rows), v(ranks, 2 * ranks), microbatches)


def _row(row: RowOfTwo, rank: int, ranks: int, share: int, microbatches: int) -> Row:
    """Return the row of one rank: number ``rank`` of ``ranks``, counted from the end at which chunk 0 begins.

    ``share`` microbatches go through each chunk. A backward is split if another rank waits for the gradient of its
    input. It is not split if there is no idle time to fill.
    """
    after = ranks - 1 - rank
    row.add(*["F0"] * (2 * after))
    row.add(*["F0", "F1"] * (rank + 1))
    for _ in range(after):
        row.add("I1")
        row.add_weight()
        row.add("F1")
    for index in range(share - 2 * ranks + rank + 1):
        if index == 0 and after == 0:
            row.add("F0", "B1")  # not together, since the previous ranks wait for this first backward
        else:
            row.overlap(forward=0, backward=1)
        row.overlap(forward=1, backward=0)
    for _ in range(after):
        row.add("B1")
        row.overlap(forward=1, backward=0)
    _backwards_that_are_left(row, rank, after)
    return row.finish(microbatches)


def _backwards_that_are_left(row: RowOfTwo, rank: int, after: int) -> None:
    """Append the end of a row. The second half of these backwards is split, and the remaining W come last."""
    whole = rank + 1  # the number of the 2 * (rank + 1) backwards of both chunks that are not split
    for index in range(2 * (rank + 1)):
        row.add(f"{'B' if index < whole else 'I'}{1 - index % 2}")
    for _ in range(after):
        row.add_weight()
        row.add("I0")
    for _ in range(rank + 1):
        row.add_weight()
