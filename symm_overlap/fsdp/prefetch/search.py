"""Choose how far each layer looks ahead, with the simulator: the shortest step that fits into memory.

First every layer looks equally far ahead, in forward and then in backward; after that one layer at a time looks one
layer further or less far, as long as that helps. Of equally fast plans the one with less memory is taken, then the one
that is closer to torch's default. The search depends on the trace and the cap alone, so ranks that have agreed on these
find the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...plan import simulate
from .issue_order import Prefetch
from .lists import Start, lists, starts_of
from .step_plan import Options, peak_bytes, step_plan
from .trace import Trace

DEEPEST = 8
"""The largest distance that is tried for all layers alike."""
TRIES, LAYERS = 1000, 30_000
"""After so many simulations, or so many layers in all of them together, the search takes the best that it has found."""


@dataclass(frozen=True)
class Predicted:
    """What the simulator says of a step.

    Attributes:
        step, exposed: milliseconds of the step, and of what is not computation in it.
        memory: the most bytes of gathered outputs and unsharded parameters at once.
    """

    step: float
    exposed: float
    memory: int


def predict(trace: Trace, prefetch: Prefetch, options: Options | None = None) -> Predicted:
    """Simulate a step."""
    made = step_plan(trace, prefetch, options)
    timeline = simulate([[made.plan]], made.costs)
    return Predicted(timeline.makespan, timeline.exposed, peak_bytes(trace.layers, made.issued))


Counts = tuple[int | None, ...]
Key = tuple[float, float, int, int]


class _Search:
    """Tries counts, each once."""

    def __init__(self, trace: Trace, cap: int | None, options: Options | None) -> None:
        self.trace, self.cap, self.options = trace, cap, options
        self.starts = starts_of(trace)
        self.known: dict[Prefetch, Key] = {}
        self.tries = min(TRIES, LAYERS // max(1, len(trace.layers)))

    def key(self, counts: Counts) -> Key:
        """What is minimised. First of all the bytes above the cap: where nothing fits, what needs least is taken."""
        prefetch = lists(self.trace, self.starts, counts)
        if prefetch not in self.known:
            found = predict(self.trace, prefetch, self.options)
            above = 0 if self.cap is None else max(0, found.memory - self.cap)
            told = sum(count is not None for count in counts)
            self.known[prefetch] = (above, round(found.step, 6), found.memory, told)
        return self.known[prefetch]

    def uniform(self, best: Counts, forward: bool) -> Counts:
        """The best distance that is the same for all layers of one pass."""
        candidates = [best]
        for depth in range(min(DEEPEST, len(self.starts)) + 1):
            changed = (depth if start.forward == forward else count for start, count in self._with(best))
            candidates.append(tuple(changed))
        return min(candidates, key=self.key)

    def improved(self, best: Counts) -> Counts:
        """The best that changes of one layer at a time lead to."""
        found = True
        while found and len(self.known) < self.tries:
            found = False
            for place, (start, count) in enumerate(self._with(best)):
                longest = len(start.following)
                nearby = {0 if count is None else min(count + 1, longest), None if not count else count - 1}
                for other in sorted(nearby - {count}, key=str):
                    changed = (*best[:place], other, *best[place + 1 :])
                    if len(self.known) < self.tries and self.key(changed) < self.key(best):
                        best, found = changed, True
        return best

    def _with(self, counts: Sequence[int | None]) -> list[tuple[Start, int | None]]:
        return list(zip(self.starts, counts, strict=True))


def search(trace: Trace, cap: int | None = None, options: Options | None = None) -> Prefetch:
    """The lists with which the step is shortest.

    Args:
        cap: the most bytes of gathered outputs and unsharded parameters at once. Where no plan keeps to it, the one
            that needs least is returned.
    """
    found = _Search(trace, cap, options)
    best: Counts = (None,) * len(found.starts)
    for forward in (True, False):
        best = found.uniform(best, forward)
    return lists(trace, found.starts, found.improved(best))
