"""A schedule's plans are proven like all other plans, and no ring of a link has more slots than it needs."""

from __future__ import annotations

import pytest

from symm_overlap.pipeline import Schedule
from symm_overlap.pipeline.generators import GENERATORS, generate
from symm_overlap.pipeline.lowering import add_send_recv, lower
from symm_overlap.pipeline.slots import Link, links
from symm_overlap.pipeline.step_plan import COMPUTE, COPY, step_plan
from symm_overlap.plan import Plan, verify

SIZES = [(2, 2), (2, 4), (4, 8), (3, 6)]


def plans(schedule: Schedule, found: dict[tuple[int, str], Link], copy: str) -> list[Plan]:
    return [step_plan(schedule, found, rank, copy=copy) for rank in range(schedule.ranks)]


def made(name: str, ranks: int, microbatches: int, deferred: bool) -> Schedule | None:
    """Return the lowered schedule, or None if the generator has no schedule of this size."""
    try:
        return lower(generate(name, ranks=ranks, microbatches=microbatches), deferred=deferred)
    except ValueError:
        return None


@pytest.mark.parametrize("copy", [COMPUTE, COPY])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", GENERATORS)
def test_three_steps_in_a_row_are_free_of_races_and_deadlocks(name: str, deferred: bool, copy: str) -> None:
    sizes = 0
    for ranks, microbatches in SIZES:
        schedule = made(name, ranks, microbatches, deferred)
        if schedule is not None:
            sizes += 1
            report = verify([plans(schedule, links(schedule), copy)] * 3)
            assert report.ok, report
    assert sizes >= 2


@pytest.mark.parametrize("name", GENERATORS)
def test_a_cuda_graph_of_a_step_could_deadlock(name: str) -> None:
    """This is why the runtime refuses to run a step while a graph is captured."""
    schedule = made(name, 4, 8, True)
    assert schedule is not None
    report = verify([plans(schedule, links(schedule), COPY)], graphs=True)
    assert {problem.kind for problem in report.problems} == {"graph deadlock"}


@pytest.mark.parametrize("name", GENERATORS)
def test_with_one_slot_less_some_message_overwrites_another(name: str) -> None:
    schedule = made(name, 4, 8, True)
    assert schedule is not None
    found = links(schedule)
    for key, link in found.items():
        if link.slots > 1:
            fewer = link.slots - 1
            slot_of = {microbatch: index % fewer for index, microbatch in enumerate(link.slot_of)}
            changed = {**found, key: link._replace(slots=fewer, slot_of=slot_of)}
            report = verify([plans(schedule, changed, COMPUTE)] * 3)
            assert any(problem.kind == "data race" for problem in report.problems), key


def test_a_ring_is_as_large_as_the_depth_of_the_pipeline_behind_it() -> None:
    found = links(lower(generate("1F1B", ranks=4, microbatches=16)))
    assert [found[stage, "SEND_F"].slots for stage in range(3)] == [4, 3, 2]


def test_forwards_alone_need_a_slot_for_each_microbatch() -> None:
    schedule = generate("GPipe", ranks=2, microbatches=5)
    forwards = schedule.with_rows(
        [[action for action in row if action and action.kind == "F"] for row in schedule.rows]
    )
    assert links(add_send_recv(forwards))[0, "SEND_F"].slots == 5


def test_a_step_over_a_library_touches_no_slots() -> None:
    schedule = lower(generate("ZBV", ranks=2, microbatches=4))
    plan = step_plan(schedule, links(schedule), 0, symmetric=False)
    assert not [name for name in plan.buffers if "SEND" in name]
    assert {"signal", "wait"}.isdisjoint(plan.kinds)


def test_a_schedule_that_comes_to_a_halt_has_no_links() -> None:
    schedule = lower(generate("1F1B", ranks=2, microbatches=2))
    row = [action for action in schedule.rows[0] if str(action) != "0SEND_F0"]
    with pytest.raises(ValueError, match="rank 0 waits for ever at 0RECV_B0"):
        links(schedule.with_rows([row, schedule.rows[1]]))
