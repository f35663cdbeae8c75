"""Interleaved 1F1B: 1F1B with several stages a rank, which shortens the time until every rank has work.

Two ranks, two stages a rank, two microbatches::

    rank 0   0F0 0F1 2F0 2F1  .   .   .  2B0  .  2B1  .  0B0  .  0B1
    rank 1    .  1F0 1F1 3F0 3B0 3F1 3B1  .  1B0  .  1B1

(Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021.) Microbatches go round by
round: each round takes as many of them through all stages of a rank. The paper wants rounds of ``ranks`` microbatches;
here, as in torch, there are ``microbatches // ranks`` equal rounds, or one.
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
    """How the microbatches go through the stages of all ranks, which are in a loop: ``size`` of them in each round."""

    ranks: int
    microbatches: int
    stages_per_rank: int
    size: int

    @staticmethod
    def of(schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> Rounds:
        """Check the arguments of a generator; ``schedule`` is its name for messages."""
        require(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        require_microbatches(
            schedule,
            microbatches,
            f"the microbatches must make equal rounds of {ranks} or a few more (one round per {ranks} ranks)",
            lambda count: count % max(1, count // ranks) == 0,
        )
        return Rounds(ranks, microbatches, stages_per_rank, microbatches // max(1, microbatches // ranks))

    def passes(self, rank: int) -> tuple[Passes, Passes]:
        """The forwards of a rank in order, and its backwards: those visit the stages of each round in reverse."""
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
        """How many forwards come before the first pair of a forward and a backward.

        The last rank has its last stage to reach; each rank before it runs ``per_hop`` more.
        """
        count = (self.stages_per_rank - 1) * self.size + per_hop * (self.ranks - 1 - rank)
        return min(count, self.microbatches * self.stages_per_rank)

    def schedule(self, rows: list[Row]) -> Schedule:
        """The schedule of these rows."""
        return Schedule(tuple(rows), loop(self.ranks, self.ranks * self.stages_per_rank), self.microbatches)


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Stages in a loop. The bubble is that of 1F1B divided by the stages a rank, for as many times more messages.

    Raises:
        TypeError, ValueError: an argument is not a positive integer, or the microbatches make no equal rounds.
    """
    rounds = Rounds.of("Interleaved1F1B", ranks, microbatches, stages_per_rank)
    return rounds.schedule([_row(rounds, rank) for rank in range(ranks)])


def _row(rounds: Rounds, rank: int) -> Row:
    """What one rank does: forwards, then pairs of a forward and a backward, then the backwards that are left."""
    forward_passes, backward_passes = rounds.passes(rank)
    forwards = [Action(stage, FORWARD, microbatch) for stage, microbatch in forward_passes]
    backwards = [Action(stage, FULL_BACKWARD, microbatch) for stage, microbatch in backward_passes]
    warm_up = rounds.warm_up(rank, per_hop=2)
    row: list[Action | None] = [*[None] * rank, *forwards[:warm_up]]
    if warm_up:  # until the first gradient is back from the last stage, so that all ranks run in step from then on
        first_backward = rounds.stages_per_rank * rounds.ranks + 2 * (rounds.ranks - 1 - rank)
        row += [None] * (first_backward - warm_up - rank)
    pairs = len(forwards) - warm_up
    for forward, backward in zip(forwards[warm_up:], backwards[:pairs], strict=True):
        row += [forward, backward]
    for backward in backwards[pairs:]:
        row += [None, backward]
    return tuple(row)
