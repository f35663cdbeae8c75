"""The search as a whole; see the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isnan
from random import Random

from ..layer_costs import LayerCosts
from ..simulation.activations import fits
from ..verify import verify
from .candidate import Budget, Measured
from .constructed import construct, places
from .improve import improve
from .result import SearchResult, Start
from .starts import PARTITIONS, RejectedStart, handcrafted

STAGES_PER_RANK = (1, 2, 3, 4)
STEPS = 2000
LEADERS = 3
"""How many of the best schedules are improved, each of a different origin."""


def search(
    ranks: int,
    microbatches: int,
    layers: LayerCosts,
    *,
    memory_cap: float = inf,
    stages_per_rank: Sequence[int] = STAGES_PER_RANK,
    partition: str = "balanced",
    seed: int = 0,
    steps: int = STEPS,
    progress: Callable[[int, int, float], None] | None = None,
) -> SearchResult:
    """Search for the fastest schedule for a model. The result is verified.

    Args:
        ranks, microbatches: the size of the pipeline.
        layers: the costs of the model's layers.
        memory_cap: the most memory that the activations of a rank may use, in the unit of the costs.
        stages_per_rank: the numbers of stages per rank that are tried, if there are enough layers.
        partition: which layers form a stage. "balanced": the longest stage is as short as possible. "even": equal
            numbers of layers. "auto": `auto_partition` chooses them for each handcrafted schedule.
        seed: the same seed with the same other arguments returns the same schedule.
        steps: the most schedules that are simulated. The handcrafted ones, and one for each placement, are always
            simulated.
        progress: called after each simulation with the number of simulations so far, the largest possible number, and
            the best makespan so far (inf if no schedule fits the cap yet).

    Returns:
        The best schedule within the cap, and the schedules that the search started from.

    Raises:
        TypeError, ValueError: an argument is not allowed, there are fewer layers than stages, or no schedule fits the
            cap. In the last case the message says what the smallest possible peak is.
    """
    _check(ranks, microbatches, layers, memory_cap, stages_per_rank, partition, steps)
    counts = tuple(dict.fromkeys(stages_per_rank))
    random = Random(seed)
    budget = Budget(steps, memory_cap, progress)
    starts: list[Measured] = []
    rejected: list[RejectedStart] = []
    for start in handcrafted(ranks, microbatches, layers, counts, partition, memory_cap):
        if isinstance(start, RejectedStart):
            rejected.append(start)
        elif measured := budget.measure(start):
            starts.append(measured)
    leaders = [start for start in starts if fits(start.peak, memory_cap)]
    on_places = list(places(ranks, microbatches, layers, counts, partition, memory_cap))
    share = budget.left // 4 // len(on_places)
    for place in on_places:
        leaders += [measured for measured, _ in construct(place, starts, budget, share, random)[:1]]
    if not leaders:
        raise ValueError(_nothing_fits(memory_cap, starts, [place.scheduler.whole for place in on_places]))
    _improve(leaders, budget, random)
    assert budget.best is not None, "a leader fits the cap"
    _receive_late(budget)
    return _result(budget, starts, rejected)


def _improve(leaders: list[Measured], budget: Budget, random: Random) -> None:
    """Improve the best leaders of different origin, and then the best result of these once more."""
    leaders.sort(key=lambda leader: leader.makespan)
    origins: dict[tuple[str, int], Measured] = {}
    for leader in leaders:
        origins.setdefault((leader.candidate.name, len(leader.candidate.sizes)), leader)
    share = budget.left // (LEADERS + 1)
    found = [improve(leader, budget, share, random) for leader in list(origins.values())[:LEADERS]]
    improve(min(found, key=lambda each: each.makespan), budget, budget.left - 1, random)


def _receive_late(budget: Budget) -> None:
    """Also try to receive as late as possible, unless blocking sends would then deadlock."""
    assert budget.best is not None
    candidate = budget.best.candidate
    deferred = candidate._replace(lowering=candidate.lowering._replace(deferred=True))
    if candidate.costs.one_receive_stream and verify(deferred.lowering.lower(deferred.encoded.schedule())).ok:
        budget.measure(deferred)


def _result(budget: Budget, starts: list[Measured], rejected: list[RejectedStart]) -> SearchResult:
    best = budget.best
    assert best is not None
    schedule = best.candidate.encoded.schedule()
    lowered = best.candidate.lowering.lower(schedule)
    verify(lowered).raise_for_problems()
    rows = [_start(start, budget.cap) for start in sorted(starts, key=lambda start: start.makespan)]
    return SearchResult(
        best.candidate.name,
        schedule,
        lowered,
        best.candidate.sizes,
        best.candidate.costs,
        best.makespan,
        best.peak,
        best.bubble,
        budget.cap,
        tuple(rows),
        tuple(rejected),
        budget.used,
    )


def _start(measured: Measured, cap: float) -> Start:
    candidate = measured.candidate
    count = len(candidate.frame.placement) // candidate.frame.ranks
    return Start(
        candidate.name,
        count,
        candidate.sizes,
        measured.makespan,
        measured.peak,
        measured.bubble,
        fits(measured.peak, cap),
    )


def _nothing_fits(cap: float, starts: Sequence[Measured], whole: Sequence[Sequence[float]]) -> str:
    """Return the error message for a cap that is too small for any schedule."""
    least = min(map(max, whole))
    text = (
        f"no schedule fits a cap of {cap:g}: the smallest possible peak is {least:g}, the activations of one "
        "microbatch on all stages of a rank"
    )
    best = min(starts, key=lambda start: start.peak, default=None)
    if best is not None:
        text += f"; of the handcrafted schedules {best.candidate.name} needs least, {best.peak:g}"
    return f"{text}. Allow more memory, use more ranks, or make microbatches smaller"


def _check(
    ranks: int,
    microbatches: int,
    layers: LayerCosts,
    memory_cap: float,
    stages_per_rank: Sequence[int],
    partition: str,
    steps: int,
) -> None:
    named = [("ranks", ranks), ("microbatches", microbatches), ("steps", steps)]
    for name, number in [*named, *(("stages_per_rank", count) for count in stages_per_rank)]:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{name} must be an integer, not {number!r}")
        if number < 1:
            raise ValueError(f"{name} is {number}: it must be at least 1")
    if isnan(memory_cap) or memory_cap < 0:
        raise ValueError(f"the memory cap is {memory_cap}: give a number of at least 0, or leave it out")
    if partition not in PARTITIONS:
        raise ValueError(f"partition is {partition!r}: it must be one of {', '.join(map(repr, PARTITIONS))}")
    if not stages_per_rank:
        raise ValueError("stages_per_rank is empty: give the numbers of stages per rank to try, such as (1, 2)")
    least = ranks * min(stages_per_rank)
    if layers.layers < least:
        raise ValueError(
            f"{layers.layers} layers cannot be cut into {least} stages with at least one layer each: use fewer ranks "
            "or fewer stages per rank"
        )
