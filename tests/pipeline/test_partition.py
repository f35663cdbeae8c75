"""Layers are divided into stages evenly, by balanced costs or by simulated time. A stage costs what its layers cost."""

from __future__ import annotations

import random
import time
from itertools import combinations, pairwise

import pytest

from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.layer_costs import LayerCosts
from symm_overlap.pipeline.partition import auto_partition, balanced, even
from symm_overlap.pipeline.simulation.cost import simulate_cost
from symm_overlap.pipeline.simulation.costs import PipelineCosts


def all_partitions(layers: int, stages: int) -> list[tuple[int, ...]]:
    borders = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    return [tuple(b - a for a, b in pairwise(each)) for each in borders]


def random_layers(seed: int, layers: int) -> LayerCosts:
    draw = random.Random(seed)
    numbers = [[draw.choice((0.5, 1.0, 2.0, 3.0)) for _ in range(layers)] for _ in range(5)]
    names = ("forward", "input_grad", "weight_grad", "activation", "message")
    costs = PipelineCosts(**dict(zip(names, map(tuple, numbers), strict=True)), bandwidth=draw.choice((1.0, 8.0)))
    return LayerCosts(layers, costs)


def test_costs_of_a_stage_are_those_of_its_layers_and_its_message_is_the_last_ones():
    layers = LayerCosts(4, PipelineCosts(forward=(1, 2, 3, 4), message=(5, 6, 7, 8), activation=2.0, latency=0.5))
    stages = layers.of_stages((1, 3))
    assert (stages.forward, stages.message, stages.activation) == ((1.0, 9.0), (5.0, 8.0), (2.0, 6.0))
    assert (stages.full_backward, stages.kept, stages.latency) == ((2.0, 6.0), (2.0, 6.0), 0.5)
    assert layers.of_stages((1, 3), copies=2).forward == (1.0, 9.0, 1.0, 9.0)
    for sizes in ((1, 2), (4, 0), (2, 3)):
        with pytest.raises(ValueError, match="together they have 4"):
            layers.of_stages(sizes)


def test_layers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="forward has 2 numbers, but there are 3 layers"):
        LayerCosts(3, PipelineCosts(forward=(1, 2)))
    with pytest.raises(ValueError, match="layers is 0"):
        LayerCosts(0, PipelineCosts())
    with pytest.raises(TypeError, match="must be an integer"):
        LayerCosts(2.0, PipelineCosts())  # type: ignore[arg-type]


def test_even_stages_have_equal_layers():
    assert even(8, 4) == (2, 2, 2, 2)
    assert even(10, 4) == (3, 3, 2, 2)


@pytest.mark.parametrize("seed", range(20))
def test_balanced_has_the_shortest_longest_stage_and_then_the_least_squares(seed):
    layers = random_layers(seed, 8)
    work = layers.work()

    def key(sizes: tuple[int, ...]) -> tuple[float, float]:
        sums, start = [], 0
        for size in sizes:
            sums.append(sum(work[start : start + size]))
            start += size
        return max(sums), sum(each * each for each in sums)

    for stages in (1, 2, 3, 8):
        assert key(balanced(layers, stages)) == pytest.approx(min(map(key, all_partitions(8, stages))))


@pytest.mark.parametrize("unit", [2.0**-1070, 2.0**-700, 2.0**500, 2.0**530, 2.0**1000])
def test_balanced_has_the_same_stages_in_any_unit(unit):
    def sizes(unit):
        forward = tuple(unit * each for each in (3.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 3.0))
        return balanced(LayerCosts(8, PipelineCosts(forward=forward, input_grad=0.0, weight_grad=0.0)), 4)

    assert sizes(unit) == sizes(1.0) == (1, 3, 2, 2)


def test_balanced_is_quick_for_many_layers():
    layers = LayerCosts(1000, PipelineCosts())
    began = time.monotonic()
    assert balanced(layers, 8) == (125,) * 8
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("name", "ranks", "count"), [("1F1B", 3, 1), ("ZBVZeroBubble", 2, 2), ("DualPipe", 2, 2)])
def test_auto_partition_finds_the_best_of_all(seed, name, ranks, count):
    layers = random_layers(seed, 7)
    schedule = generate(name, ranks, 6, count)
    stages = schedule.stages // schedule.pipelines
    found = auto_partition(schedule, layers)

    def makespan(sizes):
        return simulate_cost(schedule, layers.of_stages(sizes, schedule.pipelines)).makespan

    assert found.exact
    assert found.evaluated == len(all_partitions(7, stages))
    assert found.makespan == min(map(makespan, all_partitions(7, stages))) == makespan(found.sizes)


def test_auto_partition_of_many_layers_is_no_worse_than_where_it_starts():
    layers = random_layers(1, 30)
    schedule = generate("1F1B", 6, 8)
    found = auto_partition(schedule, layers, steps=150)
    starts = [simulate_cost(schedule, layers.of_stages(sizes)).makespan for sizes in (balanced(layers, 6), even(30, 6))]
    assert not found.exact
    assert found.evaluated <= 150
    assert found.makespan < min(starts), "the starts of this model can be improved"
    assert found == auto_partition(schedule, layers, steps=150)


def test_auto_partition_keeps_the_cap_and_says_when_it_cannot():
    layers = LayerCosts(6, PipelineCosts(activation=(4, 1, 1, 1, 1, 1)))
    schedule = generate("1F1B", 2, 4)
    found = auto_partition(schedule, layers, memory_cap=8.0)
    assert found.peak == 8.0
    assert found.sizes == (1, 5)
    with pytest.raises(ValueError, match=r"fits the cap of 7: the smallest peak is 8"):
        auto_partition(schedule, layers, memory_cap=7.0)


def test_fewer_layers_than_stages_are_refused():
    layers = LayerCosts(3, PipelineCosts())
    for cut in (
        lambda: balanced(layers, 4),
        lambda: even(3, 4),
        lambda: auto_partition(generate("1F1B", 4, 4), layers),
    ):
        with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages"):
            cut()
    with pytest.raises(ValueError, match="steps is 0"):
        auto_partition(generate("1F1B", 2, 4), layers, steps=0)
