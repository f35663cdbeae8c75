"""Choose how far each layer looks ahead, with the simulator: the shortest step that fits into memory.

First, all layers look equally far ahead, in forward and then in backward. After that, one layer at a time looks one
layer further or less far, as long as that helps. Among equally fast plans, the one with less memory is chosen, then the
one that is closer to torch's default. The search depends on the trace, the options and the cap only, so ranks that have
agreed on these find the same plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from ...plan import simulate
from .issue_order import Prefetch
from .lists import Start, lists, starts_of
from .step_plan import Options, peak_bytes, step_plan
from .trace import Trace

DEEPEST = 8
"""The largest distance that is tried for all layers at once."""
TRIES, CALLS = 1000, 120_000
"""The search ends after ``TRIES`` simulations, or after ``CALLS`` simulated calls in total, with the best plan so far.
A layer that runs once in forward and once in backward makes four calls."""


@dataclass(frozen=True)
class Predicted:
    """What the simulator predicts for a step.

    Attributes:
        step, exposed: milliseconds of the step, and of the part of it that is not computation.
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
    """Tries counts (how many layers each start gathers ahead), each once."""

    def __init__(self, trace: Trace, cap: int | None, options: Options | None) -> None:
        self.trace, self.cap, self.options = trace, cap, options
        self.starts = starts_of(trace)
        self.known: dict[Prefetch, Key] = {}
        self.tries = min(TRIES, CALLS // max(1, len(trace.calls)))

    def key(self, counts: Counts) -> Key:
        """Return what is minimised, first the bytes above the cap: if nothing fits, the plan that needs least wins."""
        prefetch = lists(self.trace, self.starts, counts)
        if prefetch not in self.known:
            found = predict(self.trace, prefetch, self.options)
            above = 0 if self.cap is None else max(0, found.memory - self.cap)
            explicit = sum(count is not None for count in counts)
            self.known[prefetch] = (above, round(found.step, 6), found.memory, explicit)
        return self.known[prefetch]

    def uniform(self, best: Counts, forward: bool) -> Counts:
        """Return the best counts in which all layers of one pass look equally far ahead."""
        candidates = [best]
        for depth in range(min(DEEPEST, len(self.starts)) + 1):
            changed = (depth if start.forward == forward else count for start, count in self._with(best))
            candidates.append(tuple(changed))
        return min(candidates, key=self.key)

    def improved(self, best: Counts) -> Counts:
        """Return the best counts that changing one layer at a time leads to."""
        found = True
        while found and len(self.known) < self.tries:
            found = False
            for place, (start, count) in enumerate(self._with(best)):
                longest = len(start.next_layers)
                nearby = {0 if count is None else min(count + 1, longest), None if not count else count - 1}
                for other in sorted(nearby - {count}, key=str):
                    changed = (*best[:place], other, *best[place + 1 :])
                    if len(self.known) < self.tries and self.key(changed) < self.key(best):
                        best, found = changed, True
        return best

    def _with(self, counts: Sequence[int | None]) -> list[tuple[Start, int | None]]:
        return list(zip(self.starts, counts, strict=True))


def search(trace: Trace, cap: int | None = None, options: Options | None = None) -> Prefetch:
    """Return the prefetch lists with which the step is shortest.

    Args:
        cap: the most bytes of gathered outputs and unsharded parameters at once. If no plan fits the cap, a warning
            says so, and the plan that needs least is returned.
    """
    found = _Search(trace, cap, options)
    best: Counts = (None,) * len(found.starts)
    for forward in (True, False):
        best = found.uniform(best, forward)
    best = found.improved(best)
    above, _, memory, _ = found.key(best)
    if above:
        warnings.warn(
            f"symm_overlap: no prefetch found keeps gathered outputs and unsharded parameters within {cap} bytes: the "
            f"one that needs least is used, with {memory} bytes",
            stacklevel=2,
        )
    return lists(trace, found.starts, best)
