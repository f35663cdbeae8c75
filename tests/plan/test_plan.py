"""The properties of a plan are derived from its steps."""

import pytest

from symm_overlap.plan import Builder, Life, Region, Step

from .timelines import by_hand

FORK, JOIN = Step("fork", "s"), Step("join", "s")


@pytest.mark.parametrize(("named", "channels"), [([], 0), ([0], 1), ([0, 5], 6)])
def test_channels_are_as_many_as_the_highest_one_needs(named, channels):
    signals = [Step("signal", "s", peers=(1,), channel=channel) for channel in named]
    assert by_hand(0, 2, FORK, *signals, JOIN).channels == channels


def test_extents_are_the_units_of_this_ranks_buffers():
    steps = [
        Step("pull", "s", reads=(Region("x", 1, 8, 9),), writes=(Region("y", 0, 2, 4),)),
        Step("pull", "s", writes=(Region("y", 0, 0, 1),)),
    ]
    assert by_hand(0, 2, FORK, *steps, JOIN).extents == {"y": 4}


def test_a_builder_declares_the_buffers_that_steps_touch_in_the_order_given():
    lives = {"unused": Life.SCRATCH, "b": Life.CALL, "a": Life.OUTPUT, "x": Life.INPUT}
    builder = Builder("op", 1, 2, stream="s", buffers=lives, inputs={"x": 3})
    builder.add("pull", "t", reads=[Region("b", 0, 0, 1)])
    plan = builder.finish(builder.here("a", 0))
    assert list(plan.buffers.items()) == [("b", Life.CALL), ("a", Life.OUTPUT), ("x", Life.INPUT)]
    assert plan.steps[0] == Step("fork", "s", writes=(Region("x", 1, 0, 3),))
    assert plan.streams == ("s", "t")


def test_a_builder_keeps_only_the_dependencies_that_nothing_else_gives():
    builder = Builder("op", 0, 1, stream="s", buffers={}, inputs={})
    first, second = (builder.add("consume", stream) for stream in ("t", "t"))
    third = builder.add("consume", "u", after=[first, second])
    fourth = builder.add("consume", "s", after=[first, third])
    plan = builder.finish()
    assert [plan.steps[index].after for index in (first, second, third, fourth)] == [(0,), (), (second,), (third,)]
    assert plan.steps[-1].after == ()
