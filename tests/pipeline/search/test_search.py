"""A search result is verified, within the cap, no worse than its starts, and the same for the same seed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from symm_overlap.pipeline.layer_costs import LayerCosts
from symm_overlap.pipeline.lowering import lower
from symm_overlap.pipeline.search import search
from symm_overlap.pipeline.simulation.cost import simulate_cost
from symm_overlap.pipeline.simulation.costs import PipelineCosts
from symm_overlap.pipeline.simulation.unit_time import simulate_unit_time
from symm_overlap.pipeline.verify import TRANSPORTS, verify

EVEN = LayerCosts(8, PipelineCosts(message=0.1))
UNEVEN = LayerCosts(
    9,
    PipelineCosts(
        forward=(1, 1, 2, 1, 1, 3, 1, 1, 1), weight_grad=0.5, activation=(1, 2, 1, 1, 1, 1, 2, 1, 1), message=0.2
    ),
)


def random_layers(draw: random.Random) -> LayerCosts:
    """Return costs of any shape. Many of them are equal, so that there are ties."""
    layers = draw.randint(4, 12)

    def some(values: tuple[float, ...]) -> float | tuple[float, ...]:
        return draw.choice(values) if draw.random() < 0.5 else tuple(draw.choice(values) for _ in range(layers))

    activation = some((0.5, 1.0, 2.0))
    kept = None
    if draw.random() < 0.5:
        share = draw.choice((0.0, 0.5, 1.5))
        kept = activation * share if isinstance(activation, float) else tuple(each * share for each in activation)
    costs = PipelineCosts(
        forward=some((0.0, 1.0, 1.5)),
        input_grad=some((0.5, 1.0, 2.0)),
        weight_grad=some((0.0, 0.3, 1.0)),
        full_backward=draw.choice((None, 1.5)),
        message=some((0.0, 0.2, 1.0)),
        latency=draw.choice((0.0, 0.3)),
        one_receive_stream=draw.random() < 0.3,
        unshard=draw.choice((0.0, 0.0, 0.4)),
        reduce_grad=draw.choice((0.0, 0.0, 0.4)),
        slow_down=draw.choice((1.0, 1.2)),
        activation=activation,
        kept=kept,
    )
    return LayerCosts(layers, costs)


def peaks_of(result) -> list[float]:
    """Return the peak memory of each rank's activations, counted action by action."""
    whole, kept = (result.costs.each(name, result.schedule.stages) for name in ("activation", "kept"))
    peaks = []
    for row in result.lowered.rows:
        now, seen = 0.0, [0.0]
        for action in row:
            for kind in "FIWB":  # in a compound, the forward comes first
                for leaf in action.leaves:
                    if leaf.kind == kind:
                        most, half = whole[leaf.stage], kept[leaf.stage]
                        now += {"F": most, "I": half - most, "W": -half, "B": -most}[kind]
                        seen.append(now)
        peaks.append(max(seen))
    return peaks


def check(result, layers, microbatches, cap):
    """Check what must hold for every result."""
    assert result.peak <= cap * (1 + 1e-9)
    counted = simulate_cost(result.lowered, result.costs)
    assert counted.makespan == result.makespan, "the returned schedule must be the one that was simulated"
    assert max(peaks_of(result)) == pytest.approx(result.peak)
    assert sum(result.sizes) == layers.layers
    best = result.best_start
    if best is not None:
        assert result.makespan <= best.makespan * (1 + 1e-12)
        assert result.gain >= 0
    for transport in TRANSPORTS:
        for schedule in (result.schedule, result.lowered, lower(result.schedule), lower(result.schedule, waits=True)):
            verify(schedule, transport=transport).raise_for_problems()
    simulate_unit_time(result.lowered)
    simulate_unit_time(lower(result.schedule))
    assert result.schedule.microbatches == microbatches


@pytest.mark.parametrize("layers", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("cap", [float("inf"), 12.0, 6.0])
def test_a_result_holds_and_is_no_worse_than_the_best_start_at_the_same_cap(layers, cap):
    check(search(4, 6, layers, memory_cap=cap, steps=250), layers, 6, cap)


def test_it_finds_something_better_where_costs_are_uneven():
    result = search(4, 6, UNEVEN, memory_cap=16.0, steps=400)
    assert result.gain > 0.02
    assert f"{result.gain:.1%} shorter than the best handcrafted schedule at the same cap of 16" in str(result)


def test_the_same_seed_gives_the_same_schedule_and_another_seed_may_not():
    first, again = (search(4, 6, UNEVEN, memory_cap=16.0, steps=300, seed=3) for _ in range(2))
    assert (first.schedule, first.lowered, first.makespan, first.evaluated) == (
        again.schedule,
        again.lowered,
        again.makespan,
        again.evaluated,
    )
    others = [search(4, 6, UNEVEN, memory_cap=16.0, steps=300, seed=seed).schedule for seed in (4, 5, 6)]
    assert any(other != first.schedule for other in others)


def test_the_verifier_counts_no_more_activations_than_the_cap():
    layers = LayerCosts(8, PipelineCosts())
    for cap in (4.0, 6.0, 8.0):  # a rank has one stage of two layers, or two stages of one
        result = search(4, 8, layers, memory_cap=cap, steps=150)
        size = 8 // len(result.sizes)
        assert max(verify(result.lowered).peak_activations) * size <= cap


def test_a_cap_that_nothing_fits_is_refused_with_the_smallest_peak_that_can_be():
    with pytest.raises(ValueError, match=r"no schedule fits a cap of 1\.5: the smallest possible peak is 2,"):
        search(4, 6, EVEN, memory_cap=1.5, steps=100)
    result = search(4, 6, EVEN, memory_cap=2.0, steps=100)
    assert result.peak == 2.0
    assert result.best_start is None
    assert result.gain is None
    assert "no handcrafted schedule fits the cap of 2; this one does" in str(result)
    check(result, EVEN, 6, 2.0)


def test_one_rank_is_never_idle():
    result = search(1, 3, LayerCosts(4, PipelineCosts(message=1.0)), steps=200)
    assert result.makespan == 36.0
    assert result.bubble == 0.0
    check(result, LayerCosts(4, PipelineCosts(message=1.0)), 3, float("inf"))


def test_one_microbatch_and_costs_of_nothing():
    check(search(3, 1, EVEN, steps=100), EVEN, 1, float("inf"))
    nothing = LayerCosts(4, PipelineCosts(0.0, 0.0, 0.0, activation=0.0))
    result = search(2, 3, nothing, memory_cap=0.0, steps=100)
    assert (result.makespan, result.gain) == (0.0, 0.0)
    check(result, nothing, 3, 0.0)


@pytest.mark.parametrize("partition", ["even", "balanced", "auto"])
def test_every_partition_can_be_asked_for(partition):
    result = search(2, 4, UNEVEN, partition=partition, steps=150, stages_per_rank=(1, 2))
    check(result, UNEVEN, 4, float("inf"))
    one = next(start for start in result.starts if start.name == "1F1B")
    assert one.sizes == (5, 4) or partition != "even"


def test_the_simulator_chooses_better_partitions_than_the_sums_of_layers():
    by_sums = search(2, 4, UNEVEN, partition="balanced", steps=60)
    by_time = search(2, 4, UNEVEN, partition="auto", steps=60)
    times = {start.name: start.makespan for start in by_sums.starts if start.stages_per_rank == 1}
    for start in by_time.starts:
        if start.stages_per_rank == 1:
            assert start.makespan <= times[start.name]


def test_the_table_shows_every_start_and_what_cannot_be():
    text = str(search(3, 4, EVEN, memory_cap=7.0, steps=80))
    for name in ("GPipe", "1F1B", "LoopedBFS", "ZB-H1", "ZBVZeroBubble", "V-Half", "V-Min"):
        assert f"\n  {name} " in text
    assert "DualPipe " in text.split("found")[0]
    assert "3 is odd" in text
    assert " no\n" in text
    assert " yes\n" in text


def test_progress_counts_simulations_up_and_makespans_down():
    seen: list[tuple[int, int, float]] = []
    result = search(2, 4, EVEN, steps=120, progress=lambda *each: seen.append(each))
    assert [each[0] for each in seen] == list(range(1, result.evaluated + 1))
    assert {each[1] for each in seen} == {120}
    best = [each[2] for each in seen]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(best))
    assert best[-1] == result.makespan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks is 0: it must be at least 1"),
        ({"microbatches": -1}, "microbatches is -1"),
        ({"steps": 0}, "steps is 0"),
        ({"memory_cap": float("nan")}, "the memory cap is nan"),
        ({"memory_cap": -1.0}, "the memory cap is -1"),
        ({"stages_per_rank": ()}, "stages_per_rank is empty"),
        ({"stages_per_rank": (1, 0)}, "stages_per_rank is 0"),
        ({"partition": "best"}, "partition is 'best'"),
        ({"ranks": 9}, "8 layers cannot be cut into 9 stages"),
        ({"ranks": 3, "stages_per_rank": (3, 4)}, "8 layers cannot be cut into 9 stages"),
    ],
)
def test_arguments_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        search(**{"ranks": 2, "microbatches": 4, "layers": EVEN, **changes})


def test_numbers_that_are_no_integers_are_refused():
    with pytest.raises(TypeError, match=r"ranks must be an integer, not 2\.0"):
        search(2.0, 4, EVEN)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_random_costs(seed):
    draw = random.Random(seed)
    layers = random_layers(draw)
    ranks, microbatches = draw.randint(1, min(4, layers.layers)), draw.randint(1, 7)
    cap = draw.choice((float("inf"), 4.0, 9.0, 20.0))
    partition = draw.choice(("even", "balanced", "auto"))
    try:
        result = search(ranks, microbatches, layers, memory_cap=cap, partition=partition, steps=120, seed=seed)
    except ValueError as error:
        if not str(error).startswith("no schedule fits"):
            raise
        return
    check(result, layers, microbatches, cap)


def test_of_schedules_that_take_equally_long_the_one_that_keeps_least_is_taken():
    layers = LayerCosts(5, PipelineCosts(forward=1.5, input_grad=0.1, weight_grad=(0.0, 1.0, 0.0, 0.3, 1.0)))
    result = search(1, 4, layers, steps=100)
    assert {f"{start.makespan:.9g}" for start in result.starts} == {f"{result.makespan:.9g}"}, "one rank may never wait"
    assert result.peak == 5.0, "only one microbatch may be alive at a time"
    assert result.best_start.peak == min(start.peak for start in result.starts)
    assert result.gain == 0.0
