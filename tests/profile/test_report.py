"""The text about a whole recording, and about kinds of calls."""

from __future__ import annotations

from unittest import mock

import pytest

from symm_overlap.collective.choosing.choice import Choice
from symm_overlap.profile import Activity, Recording, report
from symm_overlap.profile.recording import ROLES
from symm_overlap.profile.report import describe


def recording(*activities: Activity, device: str = "NVIDIA H100") -> Recording:
    return Recording(device, 3, activities, (), "a trace")


def test_what_is_exposed_is_the_sum_of_all_communication_that_nothing_hides() -> None:
    """One role after another, each for a power of two of milliseconds; then 100 ms idle, and a copy beside compute."""
    found, now = [], 0
    for power, role in enumerate(ROLES):
        found.append(Activity(role, role, "stream 7", now, now + 2**power))
        now += 2**power
    found.append(Activity("a gemm", "compute", "stream 7", now + 100, now + 110))
    found.append(Activity("a copy", "copy", "stream 8", now + 102, now + 106))
    lines = report([recording(*found)]).splitlines()
    assert lines[0] == "a trace: rank 3, NVIDIA H100"
    assert lines[1] == "  173.000 ms: compute 11.000 ms (6%); copies and collectives 16.000 ms, 25% of it hidden"
    assert lines[2] == (
        "  exposed communication 30.000 ms: sums 2.000, copies 4.000, collectives 8.000, waits 16.000; "
        "other work 32.000 ms, idle 100.000 ms"
    )
    assert lines[3] == "  no call of symm_overlap was recorded"
    assert len(lines) == 4


def test_a_device_that_did_nothing_and_one_on_which_nothing_moved() -> None:
    assert report([recording()]).splitlines()[1] == "  the device did nothing"
    lines = report([recording(Activity("a gemm", "compute", "stream 7", 1, 3))]).splitlines()
    assert lines[1] == "  2.000 ms: compute 2.000 ms (100%); nothing moved"
    assert report([recording(device="CPU")]).splitlines()[1].startswith("  no call")
    assert report([recording(device="CPU")], steps=True).splitlines()[2].startswith("  no steps are compared")


def test_no_recording_is_a_sentence() -> None:
    assert report([]) == "neither an activity of a GPU nor a call of symm_overlap was recorded"


@pytest.mark.parametrize(
    ("choice", "how"),
    [
        (Choice("pipelined", "planned", "", chunks=2), "pipelined, 2 chunks"),
        (Choice("pipelined", "planned", "", span=3), "pipelined, span 3"),
        (Choice("c10d", "c10d", "", whole=True), "c10d"),
        (Choice("sequential", "planned", "", whole=True), "sequential"),
        (Choice("single", "single", ""), "single"),
    ],
)
def test_a_kind_of_calls_says_into_which_parts_it_was_cut(choice: Choice, how: str) -> None:
    call = mock.Mock(text="a call", what=(None, choice), fact=lambda name: {"world": 4}[name])
    assert describe(mock.Mock(call=call)) == f"a call, 4 ranks, {how}"
