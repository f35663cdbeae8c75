"""How much memory the activations of each rank take, which follows from the order of its row alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .costs import PipelineCosts
from .encoded import NUMBERS, Encoded, parts_of

F, I, W, B = (NUMBERS[kind] for kind in "FIWB")  # noqa: E741 (torch's letters)


def fits(peak: float, cap: float) -> bool:
    """Whether a peak is within a cap; sums of fractions may end just above it."""
    return peak <= cap + 1e-9 * abs(cap)


class Activations:
    """What the activations of a pipeline take.

    Attributes:
        whole: what each stage keeps for one microbatch, from its forward on.
        kept: what is left of that between the two halves of a split backward.
    """

    def __init__(self, costs: PipelineCosts, stages: int) -> None:
        self.whole = costs.each("activation", stages)
        self.kept = costs.each("kept", stages)
        self._changes: dict[int, tuple[float, float]] = {}

    def peak(self, cells: Iterable[int], parts: Sequence[int]) -> float:
        """The most that is in use at a time when a rank runs these cells. ``parts`` are the same in every call.

        What a forward keeps comes with its start, and what a backward frees goes with its end; those of a compound
        start and end together.
        """
        changes = self._changes
        now = most = 0.0
        for code in cells:
            change = changes.get(code)
            if change is None:
                change = changes[code] = self._change(code, parts)
            now += change[0]
            if now > most:
                most = now
            now -= change[1]
        return most

    def _change(self, code: int, parts: Sequence[int]) -> tuple[float, float]:
        """What comes with the start of a cell, and what goes with its end."""
        come = gone = 0.0
        for kind, stage, _ in parts_of(code, parts):
            if kind == F:
                come += self.whole[stage]
            elif kind == B:
                gone += self.whole[stage]
            elif kind == I:
                gone += self.whole[stage] - self.kept[stage]
            elif kind == W:
                gone += self.kept[stage]
        return come, gone


def peak_activations(encoded: Encoded, costs: PipelineCosts) -> tuple[float, ...]:
    """For each rank, the most memory that its activations take at a time, in the unit of the costs.

    Actions of a rank run in the order of its row, so no clock is needed. Equals the largest number of activations in
    `CostResult.memory`; where actions take no time that may be less, since it does not tell their order. Where
    ``activation`` is 1 it is what `verify` counts.
    """
    activations = Activations(costs, len(encoded.placement))
    return tuple(activations.peak(encoded.row(rank), encoded.parts) for rank in range(encoded.ranks))
