"""Zero-bubble schedules with stages in a loop: ZB-H1, ZB-H2, and the interleaved form that torch has (ZB1P).

The backward is split. The previous rank waits for the gradient of the input (I), so I runs at once. The gradients of
the weights (W) wait until the rank would be idle. This is ZB-H1 on three ranks::

    rank 0   0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 ...
    rank 1    .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 ...
    rank 2    .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 ...

Each rank delays its W by ``delay`` microbatches. A later rank runs fewer forwards ahead, and delays its W by as many
microbatches more, so that all ranks keep the same number of activations. The schedules are those of Qi et al., "Zero
Bubble Pipeline Parallelism" (2023).
"""

from __future__ import annotations

from ..action import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from ..schedule import Row, Schedule
from .arguments import require
from .interleaved import Passes, Rounds


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Return ZB-H1: one stage a rank.

    Every rank keeps the activations of at most ``ranks`` microbatches, as rank 0 does in 1F1B.

    Raises:
        TypeError, ValueError: an argument is not a positive integer.
    """
    require("ZB-H1", ranks=ranks, microbatches=microbatches)
    return _schedule(Rounds(ranks, microbatches, 1, size=microbatches), per_hop=1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Return ZB-H2: one stage a rank. Every rank keeps the activations of at most ``2 * ranks - 1`` microbatches.

    If there are at least so many microbatches, and F, I and W take equally long, no rank is idle between its first and
    its last action.

    Raises:
        TypeError, ValueError: an argument is not a positive integer.
    """
    require("ZB-H2", ranks=ranks, microbatches=microbatches)
    return _schedule(Rounds(ranks, microbatches, 1, size=microbatches), per_hop=2)


def interleaved_zero_bubble(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return ZB1P, with stages in a loop, as in Interleaved 1F1B. With one stage a rank, it is ZB-H1.

    Raises:
        TypeError, ValueError: an argument is not a positive integer, or the microbatches do not form equal rounds.
    """
    rounds = Rounds.of("InterleavedZeroBubble", ranks, microbatches, stages_per_rank)
    return _schedule(rounds, per_hop=1)


def _schedule(rounds: Rounds, per_hop: int) -> Schedule:
    """Return the schedule in which each rank runs ``per_hop`` more forwards ahead than the rank behind it."""
    rows: list[Row] = []
    for rank in range(rounds.ranks):
        forwards, backwards = rounds.passes(rank)
        warm_up = rounds.warm_up(rank, per_hop)
        # The first gradient takes two steps for each rank behind this one. Forwards fill ``per_hop`` of these two.
        waits = (2 - per_hop) * (rounds.ranks - 1 - rank) if warm_up else 0
        rows.append((*[None] * rank, *_delayed(forwards, backwards, warm_up, waits, delay=per_hop * rank)))
    return rounds.schedule(_let_forwards_wait(rows))


def _delayed(forwards: Passes, backwards: Passes, warm_up: int, waits: int, delay: int) -> Row:
    """Return a row: forwards, then ``waits`` empty cells, then F, I and W in turn, then the remaining actions.

    The W that follows an I belongs to the I that is ``delay`` backwards earlier.
    """
    row: list[Action | None] = [Action(stage, FORWARD, microbatch) for stage, microbatch in forwards[:warm_up]]
    row += [None] * waits
    ahead = [Action(stage, FORWARD, microbatch) for stage, microbatch in forwards[warm_up:]]
    weights = [Action(stage, BACKWARD_WEIGHT, microbatch) for stage, microbatch in backwards]
    for index, (stage, microbatch) in enumerate(backwards):
        row += ahead[index : index + 1]
        row.append(Action(stage, BACKWARD_INPUT, microbatch))
        if index >= delay:
            row.append(weights[index - delay])
    return (*row, *weights[max(0, len(weights) - delay) :])


def _let_forwards_wait(rows: list[Row]) -> list[Row]:
    """Return the rows with empty cells before each forward whose input is late, if every cell takes one step."""
    aligned: list[list[Action | None]] = [[] for _ in rows]
    at = [0] * len(rows)
    done: set[tuple[int, int | None]] = set()
    running = list(range(len(rows)))
    while running:
        finished: list[tuple[int, int | None]] = []
        for rank in running:
            action = rows[rank][at[rank]]
            if action is not None and action.kind == FORWARD:
                if action.stage and (action.stage - 1, action.microbatch) not in done:
                    aligned[rank].append(None)
                    continue
                finished.append((action.stage, action.microbatch))
            aligned[rank].append(action)
            at[rank] += 1
        done.update(finished)
        running = [rank for rank in running if at[rank] < len(rows[rank])]
    return [tuple(row) for row in aligned]
