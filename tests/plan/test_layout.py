"""The plan determines where each buffer is located in a half of the workspace."""

from dataclasses import astuple

import pytest

from symm_overlap.plan import Life, Region, Step, layout

from .timelines import by_hand

FORK, JOIN = Step("fork", "s"), Step("join", "s")


def plan_of(*regions, **lives):
    return by_hand(0, 2, FORK, *(Step("consume", "s", writes=(region,)) for region in regions), JOIN, **lives)


CALL = {"a": Life.CALL, "b": Life.CALL}


def test_buffers_follow_each_other_and_units_are_aligned():
    plan = plan_of(Region("a", 0, 2, 3), Region("b", 0, 0, 1), **CALL)
    assert astuple(layout(plan, {"a": 300, "b": 1})) == (3 * 512 + 256, {"a": 0, "b": 3 * 512}, {"a": 512, "b": 256})


@pytest.mark.parametrize(("together", "second"), [(2, 768), (3, 1024)])
def test_units_that_a_step_takes_as_one_region_are_packed_and_those_of_other_buffers_are_not(together, second):
    """If a step uses several units as one region, the units of this buffer are stored without gaps."""
    plan = plan_of(Region("a", 0, 0, 1), Region("a", 0, 0, together), Region("b", 0, 1, 2), **CALL)
    expected = (second + 2 * 256, {"a": 0, "b": second}, {"a": 300, "b": 256})
    assert astuple(layout(plan, {"a": 300, "b": 100})) == expected


def test_units_that_only_a_peer_touches_have_their_place_too():
    """Regions on other ranks count too, so the layout is the same on every rank."""
    assert layout(plan_of(Region("a", 1, 3, 4), **CALL), {"a": 256}).nbytes == 4 * 256


def test_only_buffers_of_the_workspace_are_laid_out():
    lives = dict(zip("vwxyz", Life, strict=True))
    plan = plan_of(*(Region(name, 0, 0, 1) for name in lives), **lives)
    (name,) = (name for name, life in lives.items() if life is Life.CALL)
    assert astuple(layout(plan, dict.fromkeys(lives, 10))) == (256, {name: 0}, {name: 256})


def test_a_plan_without_a_workspace_needs_no_memory_and_units_may_be_empty():
    assert astuple(layout(plan_of(), {})) == (0, {}, {})
    assert layout(plan_of(Region("a", 0, 0, 4), **CALL), {"a": 0}).nbytes == 0


@pytest.mark.parametrize("sizes", [{}, {"a": -1}])
def test_the_size_of_a_unit_must_be_known(sizes):
    with pytest.raises(ValueError, match=r"unit_bytes\['a'\] is .*, since made_by_hand keeps this buffer"):
        layout(plan_of(Region("a", 0, 0, 1), **CALL), sizes)
