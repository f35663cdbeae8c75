"""Kinds of steps are records, which each layer registers."""

import pytest

from symm_overlap.plan import Kind, kind, register

COPY = Kind("test_kinds.copy", "copy engine", "copy", "#123456")


def test_a_record_is_found_by_its_name_and_may_be_registered_again():
    assert register(COPY) is COPY
    assert register(Kind("test_kinds.copy", "copy engine", "copy", "#123456")) is COPY
    assert kind("test_kinds.copy") is COPY


def test_another_record_of_the_same_name_is_refused_and_changes_nothing():
    register(COPY)
    with pytest.raises(ValueError, match=r"'test_kinds\.copy' is already registered"):
        register(Kind("test_kinds.copy", "SMs", "copy", "#123456"))
    assert kind("test_kinds.copy") is COPY


def test_a_kind_that_nobody_registered_is_named():
    with pytest.raises(ValueError, match=r"kind 'test_kinds\.none' is not registered \(known: .*barrier"):
        kind("test_kinds.none")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"occupies": "TMA"}, "occupies of kind 'x' is 'TMA'"),
        ({"role": "think"}, "role of kind 'x' is 'think'"),
        ({"role": "meet", "meets": "often"}, "meets of kind 'x' is 'often'"),
        ({"role": "meet"}, "role 'meet' and meets ''"),
        ({"meets": "posts"}, "role 'order' and meets 'posts'"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        Kind(**{"name": "x", "occupies": "", "role": "order", "colour": "red", **fields})


@pytest.mark.parametrize("name", ["fork", "join", "sleep", "signal", "wait", "barrier"])
def test_the_kinds_that_every_plan_needs_are_there(name):
    assert kind(name).role == ("order" if name in ("fork", "join", "sleep") else "meet")
    assert kind(name).occupies == ""
