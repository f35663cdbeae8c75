"""Interleaved 1F1B: 1F1B with several stages a rank, which shortens the time until every rank has work.

Two ranks, two stages a rank, two microbatches::

    rank 0   0F0 0F1 2F0 2F1  .   .   .  2B0  .  2B1  .  0B0  .  0B1
    rank 1    .  1F0 1F1 3F0 3B0 3F1 3B1  .  1B0  .  1B1

The schedule is that of Narayanan et al., "Efficient large-scale language model training on GPU clusters" (2021).
Microbatches are run in rounds of equal size: a rank runs all microbatches of a round on all its stages before it starts
the next round. The paper requires rounds of ``ranks`` microbatches. Here, as in torch, there are
``microbatches // ranks`` equal rounds, and at least one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..action import FORWARD, FULL_BACKWARD, Action
from ..placement import loop
from ..schedule import Row, Schedule
from .arguments import require, require_microbatches

Passes = list[tuple[int, int]]
"""Pairs (stage, microbatch)."""


@dataclass(frozen=True)
class Rounds:
    """The order of microbatches on stages that are placed in a loop. Each round has ``size`` microbatches."""

    ranks: int
    microbatches: int
    stages_per_rank: int
    size: int

    @staticmethod
    def of(schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> Rounds:
        """Check the arguments of a generator, and return its rounds. ``schedule`` is its name for messages."""
        require(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        require_microbatches(
            schedule,
            microbatches,
            f"the microbatches must make equal rounds of {ranks} or a few more (one round per {ranks} ranks)",
            lambda count: count % max(1, count // ranks) == 0,
        )
        return Rounds(ranks, microbatches, stages_per_rank, microbatches // max(1, microbatches // ranks))

    def passes(self, rank: int) -> tuple[Passes, Passes]:
        """Return the forwards of a rank in order, and its backwards, which visit the stages of a round in reverse."""
        local = range(self.stages_per_rank)
        forwards, backwards = (
            [
                (rank + self.ranks * index, microbatch)
                for first in range(0, self.microbatches, self.size)
                for index in order
                for microbatch in range(first, first + self.size)
            ]
            for order in (local, local[::-1])
        )
        return forwards, backwards

    def warm_up(self, rank: int, per_hop: int) -> int:
        """Return how many forwards come before the first pair of a forward and a backward.

        The last rank runs as many as it needs to reach its last stage. Each rank before it runs ``per_hop`` more than
        the rank behind it.
        """
        count = (self.stages_per_rank - 1) * self.size + per_hop * (self.ranks - 1 - rank)
        return min(count, self.microbatches * self.stages_per_rank)

    def schedule(self, rows: list[Row]) -> Schedule:
        """Return the schedule with these rows."""
        return Schedule(tuple(rows), loop(self.ranks, self.ranks * self.stages_per_rank), self.microbatches)


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return Interleaved 1F1B, with stages in a loop.

    With v stages a rank, the bubble is that of 1F1B divided by v, and there are v times as many messages.

    Raises:
        TypeError, ValueError: an argument is not a positive integer, or the microbatches do not form equal rounds.
    """
    rounds = Rounds.of("Interleaved1F1B", ranks, microbatches, stages_per_rank)
    return rounds.schedule([_row(rounds, rank) for rank in range(ranks)])


def _row(rounds: Rounds, rank: int) -> Row:
    """Return the row of one rank: forwards, then pairs of a forward and a backward, then the remaining backwards."""
    forward_passes, backward_passes = rounds.passes(rank)
    forwards = [Action(stage, FORWARD, microbatch) for stage, microbatch in forward_passes]
    backwards = [Action(stage, FULL_BACKWARD, microbatch) for stage, microbatch in backward_passes]
    warm_up = rounds.warm_up(rank, per_hop=2)
    row: list[Action | None] = [*[None] * rank, *forwards[:warm_up]]
    if warm_up:  # wait until the first gradient is back from the last stage, so that all ranks then run in step
        first_backward = rounds.stages_per_rank * rounds.ranks + 2 * (rounds.ranks - 1 - rank)
        row += [None] * (first_backward - warm_up - rank)
    pairs = len(forwards) - warm_up
    for forward, backward in zip(forwards[warm_up:], backwards[:pairs], strict=True):
        row += [forward, backward]
    for backward in backwards[pairs:]:
        row += [None, backward]
    return tuple(row)
