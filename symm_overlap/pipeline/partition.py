"""Divide the layers of a model into the stages of a pipeline.

`balanced` looks at the layers alone: it makes the longest stage as short as possible. `auto_partition` simulates a
whole step of a given schedule. So it finds out when a stage should be short, for example at the end of the pipeline or
on the same rank as a long stage. The order of the layers does not change, so the sizes of the stages define a
partition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import comb, frexp, inf, ldexp

from .layer_costs import LayerCosts
from .schedule import Schedule
from .simulation.activations import fits, peak_activations
from .simulation.cost import simulate_cost
from .simulation.costs import PipelineCosts
from .simulation.encoded import Encoded, encode

Sizes = tuple[int, ...]
"""For each stage, its number of layers."""

EXACT = 500
"""If there are at most so many partitions, all of them are tried."""


@dataclass(frozen=True)
class Partition:
    """The layers of each stage, and how a schedule runs with them.

    Attributes:
        sizes: for each stage of a pipeline, its number of layers.
        costs: the costs of all stages of the schedule.
        makespan: how long a step takes.
        peak: the most memory that the activations of any rank take at one time.
        evaluated: how many partitions were simulated.
        exact: True if all partitions were simulated, so that no other one is better.
    """

    sizes: Sizes
    costs: PipelineCosts
    makespan: float
    peak: float
    evaluated: int
    exact: bool


def even(layers: int, stages: int) -> Sizes:
    """Return stages that are as equal as possible. If some have one layer more, these come first.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    _require(layers, stages)
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def balanced(layers: LayerCosts, stages: int) -> Sizes:
    """Return the partition whose longest stage is as short as possible.

    If there are several, return the one with the least sum of squares of the stages' durations. It is found by dynamic
    programming, in at most stages * layers**2 steps.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    _require(layers.layers, stages)
    before = [0.0, *accumulate(layers.work())]
    power = -frexp(before[-1])[1]  # exact, and no square can become too large or too small for a float
    before = [ldexp(work, power) for work in before]
    return _least_squares(before, stages, _longest(before, stages) * (1 + 1e-12))


def _longest(before: Sequence[float], stages: int) -> float:
    """Return how long the longest stage is if it is as short as possible.

    ``before[k]`` is the work of the first k layers.
    """
    layers = len(before) - 1
    found = before  # for each k, the longest stage if the first k layers are cut into as many stages as so far
    for stage in range(1, stages):
        now = [inf] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            # The more layers are before the last stage, the longer are those stages, and the shorter is the last one.
            starts = range(stage, end)
            longer = bisect_left(starts, True, key=lambda start: found[start] >= before[end] - before[start])
            now[end] = min(max(found[at], before[end] - before[at]) for at in starts[max(0, longer - 1) : longer + 1])
        found = now
    return found[layers]


def _least_squares(before: Sequence[float], stages: int, allowed: float) -> Sizes:
    """Return the stages with the least sum of squares of their work, which is at most ``allowed`` for each of them."""
    layers = len(before) - 1
    found: list[tuple[float, Sizes]] = [(0.0 if k == 0 else inf, ()) for k in range(layers + 1)]  # of the first k
    for stage in range(stages):
        now: list[tuple[float, Sizes]] = [(inf, ()) for _ in range(layers + 1)]
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                work = before[end] - before[start]
                if work > allowed:
                    break
                value = found[start][0] + work * work
                if value <= now[end][0]:
                    now[end] = min(now[end], (value, (*found[start][1], end - start)))
        found = now
    return found[layers][1]


def auto_partition(
    schedule: Schedule | Encoded,
    layers: LayerCosts,
    *,
    memory_cap: float = inf,
    steps: int = 1000,
) -> Partition:
    """Find the partition of the layers with which a step of a schedule takes the least time.

    If there are at most `EXACT` partitions, and at most ``steps``, all of them are simulated. Otherwise the search
    starts from the better one of `balanced` and `even`. It moves one layer from one stage to another for as long as
    that makes a step shorter. The same arguments always give the same result.

    Args:
        schedule: a schedule of compute alone, or one with its messages.
        layers: the costs of the model's layers.
        memory_cap: the most memory that the activations of a rank may take, in the unit of the costs.
        steps: the most partitions that are simulated.

    Raises:
        ValueError: there are fewer layers than stages, or none of the partitions that were tried fits the cap.
    """
    encoded = schedule if isinstance(schedule, Encoded) else encode(schedule)
    stages = len(encoded.placement) // encoded.pipelines
    _require(layers.layers, stages)
    if steps < 1:
        raise ValueError(f"steps is {steps}: at least one partition must be simulated")
    tried = _Tried(encoded, layers, memory_cap, steps)
    exact = comb(layers.layers - 1, stages - 1) <= min(EXACT, steps)
    if exact:
        best = min(map(tried.measure, _all(layers.layers, stages)))
    else:
        starts = (balanced(layers, stages), even(layers.layers, stages))
        best = min(tried.measure(sizes) for sizes in starts if tried.left)
        best = _descend(best, tried)
    over, makespan, peak, sizes = best
    if over:
        raise ValueError(
            f"no partition of {layers.layers} layers over {stages} stages that was tried fits the cap of "
            f"{memory_cap:g}: the smallest peak is {peak:g}. Allow more memory, or use a schedule that needs less"
        )
    return Partition(sizes, layers.of_stages(sizes, encoded.pipelines), makespan, peak, len(tried.known), exact)


_Measured = tuple[float, float, float, Sizes]
"""(0, or the peak if it is over the cap; makespan; peak; sizes). The smaller tuple is better."""


class _Tried:
    """Simulates partitions, and caches the results, so that each is simulated once."""

    def __init__(self, encoded: Encoded, layers: LayerCosts, memory_cap: float, steps: int) -> None:
        self._encoded, self._layers, self._memory_cap, self._steps = encoded, layers, memory_cap, steps
        self.known: dict[Sizes, _Measured] = {}

    @property
    def left(self) -> bool:
        """True if one more partition may be simulated."""
        return len(self.known) < self._steps

    def measure(self, sizes: Sizes) -> _Measured:
        if sizes not in self.known:
            costs = self._layers.of_stages(sizes, self._encoded.pipelines)
            peak = max(peak_activations(self._encoded, costs))
            over = 0.0 if fits(peak, self._memory_cap) else peak
            self.known[sizes] = (over, simulate_cost(self._encoded, costs).makespan, peak, sizes)
        return self.known[sizes]


def _descend(best: _Measured, tried: _Tried) -> _Measured:
    """Move to the best neighbour for as long as it is better."""
    while True:
        found = min((tried.measure(sizes) for sizes in _neighbours(best[-1]) if tried.left), default=best)
        if found[:2] >= best[:2]:
            return best
        best = found


def _neighbours(sizes: Sizes) -> Iterator[Sizes]:
    """Yield each partition in which one stage has one layer less and another one more. The sizes between do not change.

    The stages between the two keep their sizes, but their layers shift by one.
    """
    for giver, size in enumerate(sizes):
        for taker in range(len(sizes)):
            if size > 1 and taker != giver:
                changed = list(sizes)
                changed[giver] -= 1
                changed[taker] += 1
                yield tuple(changed)


def _all(layers: int, stages: int) -> Iterator[Sizes]:
    """Yield every partition."""
    for borders in combinations(range(1, layers), stages - 1):
        yield tuple(stop - start for start, stop in zip((0, *borders), (*borders, layers), strict=True))


def _require(layers: int, stages: int) -> None:
    if layers < stages:
        raise ValueError(
            f"{layers} layers cannot be cut into {stages} stages: every stage has at least one layer. Use fewer ranks "
            "or fewer stages a rank, or give the costs of smaller layers"
        )
