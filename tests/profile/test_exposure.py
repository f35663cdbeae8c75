"""Where the time went: every moment is counted once, and for the right role."""

from __future__ import annotations

import random

import pytest

from symm_overlap.profile import Activity, RecordedCall, Recording, exposure, exposure_of_call, kinds_of_calls
from symm_overlap.profile.recording import ROLES

ORDER = dict(zip(ROLES, ("compute", "sums", "copies", "library", "waits", "other"), strict=True))


def act(role: str, start: float, end: float, call: int | None = None) -> Activity:
    return Activity(role, role, "stream 7", start, end, None, () if call is None else (call,))


@pytest.mark.parametrize("seed", range(30))
def test_every_moment_counts_once_for_the_first_role_that_ran(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(30):
        found = []
        for _ in range(source.randrange(1, 12)):
            start = source.randrange(40)
            found.append(act(source.choice(ROLES), start, start + source.randrange(1, 9)))
        begin, end = int(min(each.start for each in found)), int(max(each.end for each in found))
        counted = dict.fromkeys((*ORDER.values(), "idle"), 0)
        moving, hidden = [], 0
        for moment in range(begin, end):
            running = {each.role for each in found if each.start <= moment < each.end}
            counted[next((name for role, name in ORDER.items() if role in running), "idle")] += 1
            if running & {"copy", "collective"}:
                moving.append(moment)
                hidden += "compute" in running
        computing = [m for m in range(begin, end) for e in found if e.role == "compute" and e.start <= m < e.end]
        spent = exposure(found)
        assert {name: getattr(spent, name) for name in counted} == counted
        assert spent.total == end - begin == spent.compute + spent.exposed
        assert (spent.moving, spent.hidden) == (len(moving), hidden)
        assert spent.share_hidden == (hidden / len(moving) if moving else None)
        assert spent.first == (min(computing) - begin if computing else end - begin)
        assert spent.last == (end - 1 - max(computing) if computing else 0)
        assert spent.pauses == (max(moving) + 1 - min(moving) - len(moving) if moving else 0)


def test_nothing_recorded_is_no_time() -> None:
    spent = exposure([])
    assert spent.total == spent.exposed == spent.idle == 0
    assert spent.share_hidden is None


def test_on_a_cpu_the_whole_call_counts_and_on_a_gpu_its_activities() -> None:
    activities = act("copy", 12, 13, 0), act("compute", 13, 18, 0)
    calls = (RecordedCall("a call", 10, 20),)
    on_gpu = exposure_of_call(Recording("NVIDIA H100", 0, activities, calls), 0)
    assert (on_gpu.total, on_gpu.idle, on_gpu.host) == (6, 0, 10)
    on_cpu = exposure_of_call(Recording("CPU", 0, activities, calls), 0)
    assert (on_cpu.total, on_cpu.idle, on_cpu.first, on_cpu.last) == (10, 4, 3, 2)


def test_on_a_gpu_whatever_computes_hides_a_copy() -> None:
    activities = act("compute", 0, 50), act("compute", 100, 110), act("copy", 102, 106, 0), act("compute", 200, 210)
    calls = (RecordedCall("a call", 90, 95),)
    spent = exposure_of_call(Recording("NVIDIA H100", 0, activities, calls), 0)
    assert (spent.total, spent.compute, spent.exposed, spent.share_hidden) == (4, 4, 0, 1)
    activities = act("compute", 100, 103), act("copy", 102, 106, 0), act("compute", 105, 110)
    spent = exposure_of_call(Recording("NVIDIA H100", 0, activities, calls), 0)
    assert (spent.total, spent.compute, spent.exposed, spent.hidden) == (4, 2, 2, 2)
    assert spent.as_dict()["share_hidden"] == 0.5


def test_calls_of_one_name_are_one_kind_with_the_median_of_each_figure() -> None:
    calls, activities = [], []
    for index, (name, took) in enumerate((("a", 2), ("b", 100), ("a", 4), ("a", 9), ("never ran", 0), ("a", 5))):
        calls.append(RecordedCall(name, 1000 * index, 1000 * index + 1))
        if took:
            activities.append(act("compute", 1000 * index, 1000 * index + took, index))
    kinds = kinds_of_calls(Recording("NVIDIA H100", 0, tuple(activities), tuple(calls)))
    assert [(kind.call.name, kind.count, kind.median.total) for kind in kinds] == [("b", 1, 100), ("a", 4, 4.5)]
    assert kinds[1].index == 2  # took 4, of 2, 4, 5, 9
