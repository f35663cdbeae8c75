"""Local changes stay within the memory cap and improve an order that is known to be bad."""

from __future__ import annotations

from random import Random

from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.layer_costs import LayerCosts
from symm_overlap.pipeline.search.candidate import Budget
from symm_overlap.pipeline.search.improve import improve, shortest
from symm_overlap.pipeline.search.starts import candidate_of
from symm_overlap.pipeline.simulation.costs import PipelineCosts
from symm_overlap.pipeline.simulation.encoded import encode

UNEVEN = LayerCosts(4, PipelineCosts(forward=(1, 3, 1, 2), weight_grad=0.5, message=0.3))


def test_every_change_that_is_simulated_fits_the_cap():
    start = candidate_of("1F1B", encode(generate("1F1B", 4, 8)), UNEVEN, "even")
    budget = Budget(400, cap=start.peak())
    peaks = []
    measure = budget.measure

    def noted(candidate):
        peaks.append(candidate.peak())
        return measure(candidate)

    budget.measure = noted  # type: ignore[method-assign]
    measured = measure(start)
    assert measured is not None
    found = improve(measured, budget, 300, Random(0))
    assert len(peaks) >= 300
    assert max(peaks) <= budget.cap
    assert found.makespan < measured.makespan
    assert found.makespan >= shortest(start)


def test_it_stops_where_nothing_can_be_shorter():
    start = candidate_of("GPipe", encode(generate("GPipe", 1, 4)), UNEVEN, "even")
    budget = Budget(100, cap=1000.0)
    measured = budget.measure(start)
    assert measured is not None
    assert measured.makespan == shortest(start)
    improve(measured, budget, 50, Random(0))
    assert budget.used == 1
