"""Divide the layers of a model into the stages of a pipeline.

`balanced` looks at the layers alone: it makes the longest stage as short as possible. `auto_partition` simulates a
whole step of a given schedule. So it finds out when a stage should be short, for example at the end of the pipeline or
on the same rank as a long stage. The order of the layers does not change, so the sizes of the stages define a
partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import comb, inf

from .activations import fits, peak_activations
from .cost import simulate_cost
from .costs import PipelineCosts
from .encoded import Encoded, encode
from .layer_costs import LayerCosts
from .schedule import Schedule

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

    If there are several, return the one with the least sum of squares of the stages' durations. Both are found by
    dynamic programming, in stages * layers**2 steps.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    _require(layers.layers, stages)
    before = [0.0, *accumulate(layers.work())]
    longest, _ = _best(before, stages, max, lambda work: work)
    allowed = longest * (1 + 1e-12)
    _, sizes = _best(before, stages, lambda left, right: left + right, lambda w: w * w if w <= allowed else inf)
    return sizes


def _best(
    before: Sequence[float], stages: int, join: Callable[[float, float], float], value: Callable[[float], float]
) -> tuple[float, Sizes]:
    """Return the least joined value of all stages, and the sizes that have it.

    ``before[k]`` is the work of the first k layers. ``value`` maps the work of a stage to its value, and ``join``
    combines the values of stages.
    """
    layers = len(before) - 1
    found: list[tuple[float, Sizes]] = [(0.0 if k == 0 else inf, ()) for k in range(layers + 1)]  # of the first k
    for stage in range(stages):
        left = stages - stage - 1
        now: list[tuple[float, Sizes]] = [(inf, ()) for _ in range(layers + 1)]
        for end in range(stage + 1, layers - left + 1):
            now[end] = min(
                (join(found[start][0], value(before[end] - before[start])), (*found[start][1], end - start))
                for start in range(stage, end)
            )
        found = now
    return found[layers]


def auto_partition(
    schedule: Schedule | Encoded,
    layers: LayerCosts,
    *,
    memory_cap: float = inf,
    steps: int = 1000,
    starts: Iterable[Sizes] = (),
) -> Partition:
    """Find the partition of the layers with which a step of a schedule takes the least time.

    If there are at most `EXACT` partitions, and at most ``steps``, all of them are simulated. Otherwise the search
    starts from the best of `balanced`, `even` and ``starts``. It moves one layer from one stage to another for as long
    as that makes a step shorter. The same arguments always give the same result.

    Args:
        schedule: a schedule of compute alone, or one with its messages.
        layers: the costs of the model's layers.
        memory_cap: the most memory that the activations of a rank may take, in the unit of the costs.
        steps: the most partitions that are simulated.
        starts: more partitions to start from.

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
        given = dict.fromkeys((balanced(layers, stages), even(layers.layers, stages), *starts))
        best = min(tried.measure(sizes) for sizes in given if tried.left)
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
