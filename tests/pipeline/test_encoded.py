"""Schedules survive encoding as integers without loss. An action that cannot be encoded is rejected with its place."""

from __future__ import annotations

from typing import Any

import pytest

from symm_overlap.pipeline import Action, Schedule, compound_of, simulate_cost, simulate_unit_time
from symm_overlap.pipeline.action import KINDS as ALL_KINDS
from symm_overlap.pipeline.simulation.encoded import NUMBERS, OVERLAP, Encoded, code_of, encode, fields
from symm_overlap.plan.work import integers

from .random_schedules import random_compute, with_residency
from .random_tables import random_table
from .tables import lowered, table


def test_every_kind_has_a_number() -> None:
    assert NUMBERS.keys() == ALL_KINDS
    assert len(set(NUMBERS.values())) == len(NUMBERS)


def test_what_is_encoded_comes_back() -> None:
    for seed in range(50):
        for schedule in (random_table(seed), with_residency(random_compute(seed, compounds=True), seed)):
            assert encode(schedule).schedule() == schedule, seed
    two = table("0F0,0B0,3F1,3B1", "1F0,1B0,2F1,2B1", pipelines=2, placement=(0, 1, 1, 0))
    assert encode(two).schedule() == two
    assert encode(Schedule((), (), 0)).schedule() == Schedule((), (), 0)


def test_equal_actions_come_back_as_one_object() -> None:
    encoded = encode(lowered("0F0,0B0", "1F0,1B0"))
    decode = encoded.decoder()
    assert decode(encoded.cells[0]) is decode(encoded.cells[0])


def test_fields_are_the_opposite_of_a_cell() -> None:
    for known in ((1, 0, -1), (28, 2**24 - 1, 2**24 - 2), (12, 2, 7)):
        assert fields(code_of(*known)) == known


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(1, "F", 0), r"row 1 \(rank 0\), cell 2: 1F0: stage 1 is on rank 1"),
        (Action(2, "F", 0), r"row 1 \(rank 0\), cell 2: 2F0: the schedule has stages 0 to 1"),
        (Action(-1, "F", 0), "-1F0: the schedule has stages 0 to 1"),
        (Action(0, "F", 3), "0F3: the schedule has microbatches 0 to 0"),
        (Action(0, "F", -1), "0F-1: the schedule has microbatches 0 to 0"),
        (Action(0, "G", 0), "this kind of action is not known"),
        (compound_of(), "a compound must have at least one part, and no part may be a compound"),
        (compound_of(compound_of(Action(0, "F", 0))), "no part may be a compound"),
        ("0F0", "0F0: an action was expected"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(action: Action, text: str) -> None:
    schedule = Schedule(((None, action), ()), (0, 1), 1)
    with pytest.raises(ValueError, match=text):
        encode(schedule)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pipelines": 0}, "0 pipelines cannot share 1 stages"),
        ({"pipelines": 3}, "3 pipelines cannot share 1 stages"),
        ({"microbatches": -1}, "at most 16777215 stages and microbatches"),
        ({"microbatches": 2**24}, "at most 16777215 stages and microbatches"),
        ({"placement": integers([1])}, "stage 0 is on a rank without a row"),
        ({"placement": integers([])}, "there are cells, but no stages"),
        ({"starts": integers([])}, "starts must begin with 0"),
        ({"starts": integers([0, 1 << 30])}, "starts does not fit cells"),
        ({"starts": integers([0, 1, 0, 1]), "placement": integers([2])}, "starts must not descend"),
        ({"cells": integers([code_of(NUMBERS["F"], 1, 0)])}, "a stage or a microbatch that does not exist"),
        ({"cells": integers([code_of(NUMBERS["F"], 0, 1)])}, "a stage or a microbatch that does not exist"),
        ({"cells": integers([code_of(32, 0, 0)])}, "there is no kind of action 32"),
        ({"cells": integers([-1])}, "there is no kind of action -1"),
        ({"cells": integers([code_of(OVERLAP, 2, 0)])}, "a compound has parts that are not there"),
    ],
)
def test_integers_that_are_no_schedule_are_refused(change: dict[str, Any], text: str) -> None:
    """C++ would otherwise divide by zero, or access memory that is not there."""
    right = Encoded(integers([code_of(NUMBERS["F"], 0, 0)]), integers([0, 1]), integers([]), integers([0]), 1)
    assert simulate_unit_time(right).length == simulate_cost(right).makespan == 1
    for simulate in (simulate_unit_time, simulate_cost):
        with pytest.raises(ValueError, match=text):
            simulate(right._replace(**change))


def test_a_microbatch_whose_number_does_not_fit_is_refused() -> None:
    """Its highest bits would change the kind of the action."""
    with pytest.raises(ValueError, match="at most 16777215 microbatches and stages, not 16777216 and 1"):
        encode(Schedule.from_rows([[Action(0, "F", 2**24 - 1)]]))
