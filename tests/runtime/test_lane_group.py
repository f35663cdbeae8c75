"""The errors of making the group of a lane say what happened, and none of them is waited for without end."""

from __future__ import annotations

import time
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from symm_overlap.runtime.lane import lane_of_pipelines, name_of_lane

lane_group: Any = import_module("symm_overlap.runtime.lane_group")  # the package has a function of this name

STATE: Any = SimpleNamespace(name="some group", rank=0, world=1)


@pytest.mark.parametrize("error", [RuntimeError("no such interface"), RuntimeError(""), TimeoutError("of a store")])
def test_an_error_of_torch_is_told_with_the_lane(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(lane_group, "gloo_group", fails)
    text = f"the group of lane 7 of 'some group' was not made: {error}$"
    with pytest.raises(dist.DistBackendError, match=text) as raised:
        lane_group._made(STATE, STATE, 7, 60.0)
    assert raised.value.__cause__ is error


def test_lanes_have_the_numbers_that_the_user_gives() -> None:
    assert name_of_lane(3) == "lane 3"
    assert name_of_lane(lane_of_pipelines(3)) == "lane 3 of pipelines"


def test_a_deadline_says_that_not_all_ranks_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(group: object, name: str, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Wait timeout")

    monkeypatch.setattr(lane_group, "gloo_group", waits)
    with pytest.raises(dist.DistBackendError, match=r"within 0\.3 s, because not all ranks came in time: Wait"):
        lane_group._made(STATE, STATE, 7, 0.3)


def test_torch_may_not_wait_past_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo would try several times to connect to a rank that has given up."""
    monkeypatch.setattr(lane_group, "gloo_group", lambda *_: time.sleep(3))
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=r"not made within 0\.3 s, because not all ranks came in time$"):
        lane_group._made(STATE, STATE, 7, 0.3)
    assert time.monotonic() - began < 2


def test_other_errors_are_raised_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("a bad argument")

    monkeypatch.setattr(lane_group, "gloo_group", fails)
    with pytest.raises(ValueError, match="a bad argument"):
        lane_group._made(STATE, STATE, 7, 60.0)
