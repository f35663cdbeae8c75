"""Schedules survive encoding as integers without loss. An action that cannot be encoded is rejected with its place."""

from __future__ import annotations

import pytest

from symm_overlap.pipeline import Action, Schedule, compound_of
from symm_overlap.pipeline.action import KINDS as ALL_KINDS
from symm_overlap.pipeline.encoded import NUMBERS, code_of, encode, fields

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
