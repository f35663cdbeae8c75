"""V-Half and V-Min: two stages a rank in a V, with a half or a third of the activations of 1F1B.

A schedule repeats one *building block* every six steps. The block has the six passes of one microbatch (F, I and W of
two stages), with their times on each rank. An activation is kept from its F to its W. So the number of activations that
a rank keeps is the sum of its two lifespans in the block, divided by six steps. In V-Min, a microbatch goes through all
stages without a pause::

    rank 0   F . . . . . . F I . . . . . . I      forward down the V and up again,
    rank 1   . F . . . . F . . I . . . . I .      backward the same way, one step a rank
    rank 2   . . F . . F . . . . I . . I . .
    rank 3   . . . F F . . . . . . I I . . .

In V-Half, a microbatch takes two steps a rank on both ways down, so ranks are idle for less time at the beginning and
at the end. If passes of different microbatches would fall into the same step on some rank, microbatches wait at a turn
of the V. After the last forward of a rank, no order can raise its peak. So from there on, an I runs before any W
whenever it can, since other ranks wait for it.

The method is that of Qi et al., "Pipeline Parallelism with Controllable Memory" (2024). Here, the waits at the turns
and the places of W are found by a search, for any number of ranks.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from ..action import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from ..placement import v
from ..schedule import Row, Schedule
from .arguments import require, require_two_stages
from .cool_down import gradients_first

PERIOD = 6
"""The number of steps after which the next microbatch starts. It equals the number of its passes on a rank."""

Times = tuple[int, int, int, int]
"""The steps at which a rank runs F of its first stage, F of its second, I of its second and I of its first."""


def v_half(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return V-Half: two stages a rank, in a V.

    A rank keeps at most the activations of ``(ranks + 2) // 2`` whole microbatches.

    Raises:
        TypeError, ValueError: an argument is not a positive integer, or ``stages_per_rank`` is not 2.
    """
    return _schedule("V-Half", ranks, microbatches, stages_per_rank, hops=(2, 1, 2, 1))


def v_min(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return V-Min: two stages a rank, in a V.

    A rank keeps at most the activations of ``(ranks + 4) // 3`` whole microbatches.

    Raises:
        TypeError, ValueError: an argument is not a positive integer, or ``stages_per_rank`` is not 2.
    """
    return _schedule("V-Min", ranks, microbatches, stages_per_rank, hops=(1, 1, 1, 1))


def _schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int, hops: Times) -> Schedule:
    """Return the schedule in which a microbatch takes ``hops`` steps a rank on each of the four legs of its way."""
    require(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    require_two_stages(name, stages_per_rank)
    block = building_block(ranks, hops)
    rows = [_row(block[rank], (rank, 2 * ranks - 1 - rank), microbatches) for rank in range(ranks)]
    return Schedule(gradients_first(rows), v(ranks, 2 * ranks), microbatches)


def _row(times: tuple[int, ...], stages: tuple[int, int], microbatches: int) -> Row:
    """Return the passes of all microbatches on one rank, in the order of their times, without idle steps."""
    first, second = stages
    passes = (
        (FORWARD, first),
        (FORWARD, second),
        (BACKWARD_INPUT, second),
        (BACKWARD_INPUT, first),
        (BACKWARD_WEIGHT, second),
        (BACKWARD_WEIGHT, first),
    )
    # Every residue modulo the period belongs to exactly one pass, so one loop over the steps finds the order.
    by_residue = sorted(zip(times, passes, strict=True), key=lambda timed: timed[0] % PERIOD)
    row: list[Action | None] = []
    for start in range(0, max(times) + PERIOD * microbatches, PERIOD):
        for time, (kind, stage) in by_residue:
            microbatch = (start + time % PERIOD - time) // PERIOD
            if 0 <= microbatch < microbatches:
                row.append(Action(stage, kind, microbatch))
    return tuple(row)


@lru_cache(maxsize=64)
def building_block(ranks: int, hops: Times) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank, the steps of the six passes of one microbatch.

    The order is F, F, I, I as in `Times`, then the W of its second stage and that of its first. All waits at the turns
    that are shorter than a period are tried. Those are used with which the largest number of activations on any rank is
    smallest.
    """
    found: list[tuple[int, int, tuple[tuple[int, ...], ...]]] = []
    for waits in product(range(PERIOD), repeat=3):
        times = [_times(rank, ranks, hops, (waits[0], waits[1], waits[2])) for rank in range(ranks)]
        if all(len({time % PERIOD for time in each}) == len(each) for each in times):
            block = tuple((*each, *_weights(each)) for each in times)
            found.append((max(map(_kept, block)), sum(waits), block))
    return min(found)[2]


def _kept(times: tuple[int, ...]) -> int:
    """Return the most activations that a rank keeps at once. Each is kept from its F to its W, both steps included."""
    first, second, _, _, second_weight, first_weight = times
    lives = ((first, first_weight), (second, second_weight))
    return max(
        sum((end - step) // PERIOD - (start - 1 - step) // PERIOD for start, end in lives) for step in range(PERIOD)
    )


def _times(rank: int, ranks: int, hops: Times, waits: tuple[int, int, int]) -> Times:
    """Return the steps of F, F, I, I on a rank.

    ``waits`` are the waits at the turns: at the last rank, at the first rank, and at the last rank again.
    """
    before, after = rank, ranks - 1 - rank
    far = ranks - 1
    forward = hops[0] * before
    second_forward = hops[0] * far + 1 + waits[0] + hops[1] * after
    turned = hops[0] * far + 1 + waits[0] + hops[1] * far + 1 + waits[1]
    second_backward = turned + hops[2] * before
    backward = turned + hops[2] * far + 1 + waits[2] + hops[3] * after
    return forward, second_forward, second_backward, backward


def _weights(times: Times) -> tuple[int, int]:
    """Return the steps of W of the second and of the first stage: the two free steps of a period, after their I."""
    free = [residue for residue in range(PERIOD) if residue not in {time % PERIOD for time in times}]
    _, _, second, first = times

    return min(
        ((second + (one - second) % PERIOD, first + (other - first) % PERIOD) for one, other in (free, free[::-1])),
        key=sum,
    )
