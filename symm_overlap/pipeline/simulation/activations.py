"""Compute how much memory the activations of each rank take. Only the order of the rank's row matters for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .costs import PipelineCosts
from .encoded import NUMBERS, Encoded, parts_of

F, I, W, B = (NUMBERS[kind] for kind in "FIWB")  # noqa: E741 (torch's letters)


def fits(peak: float, cap: float) -> bool:
    """True if a peak is within a cap. Rounding may put a sum of fractions just above the cap, which is allowed."""
    return peak <= cap + 1e-9 * abs(cap)


class Activations:
    """The memory that the activations of a pipeline take.

    Attributes:
        whole: for each stage, the memory that it keeps for one microbatch, from its forward on.
        kept: for each stage, how much of that is still kept between the two halves of a split backward.
    """

    def __init__(self, costs: PipelineCosts, stages: int) -> None:
        self.whole = costs.each("activation", stages)
        self.kept = costs.each("kept", stages)
        self._changes: dict[int, tuple[float, float]] = {}

    def peak(self, cells: Iterable[int], parts: Sequence[int]) -> float:
        """Return the most memory that is in use at one time when a rank runs these cells.

        A forward allocates its memory when it starts, and a backward frees memory when it ends. The parts of a compound
        start and end together. ``parts`` must be the same in every call, because changes are cached by cell.
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
        """Return the memory that a cell allocates when it starts, and the memory that it frees when it ends."""
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
    """Return, for each rank, the most memory that its activations take at one time, in the unit of the costs.

    The actions of a rank run in the order of its row, so no clock is needed. The result equals the largest number of
    activations in `CostResult.memory`. If actions take no time, that number may be smaller, because it merges all
    changes at the same time. If ``activation`` is 1, the result is the number that `verify` counts.
    """
    activations = Activations(costs, len(encoded.placement))
    return tuple(activations.peak(encoded.row(rank), encoded.parts) for rank in range(encoded.ranks))
