"""The plans of gathers and reductions in slots hold for consecutive calls. With fewer slots or waits, they do not."""

from __future__ import annotations

import pytest

from symm_overlap.collective.planners import ALL_GATHER, MATMUL_REDUCE_SCATTER
from symm_overlap.fsdp.communication.planners import gather_in_slot, reduce_in_slot
from symm_overlap.plan import Builder, Contract, Life, Plan, Region, Report, verify
from symm_overlap.plan.testing import redundant

CALLS = 7
GATHER = Contract((), ALL_GATHER.makes, lambda _, plan, __, given: [given(rank, 0) for rank in range(plan.world)])
REDUCE = Contract(
    ("output",),
    MATMUL_REDUCE_SCATTER.makes,
    lambda names, plan, _, given: [names("sum", *(given(rank, plan.rank) for rank in range(plan.world)))],
)
KINDS = ("gather", "gather outside", "reduce", "reduce in place")


def in_a_row(kind: str, world: int, slots: int, calls: int = CALLS) -> list[list[Plan]]:
    """Return the plans of all ranks for consecutive calls."""
    made = []
    for call in range(calls):
        if kind.startswith("gather"):
            outside = kind == "gather outside"
            made.append([gather_in_slot(rank, world, call % slots, outside=outside) for rank in range(world)])
        else:
            in_place = kind == "reduce in place"
            made.append([reduce_in_slot(rank, world, call % slots, in_place=in_place) for rank in range(world)])
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_calls_in_a_row_hold(kind: str, world: int, slots: int) -> None:
    contract = GATHER if kind.startswith("gather") else REDUCE
    verify(in_a_row(kind, world, slots), graphs=True, contracts=[contract] * CALLS).raise_for_problems()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_one_slot_is_a_race(kind: str, world: int) -> None:
    problems = verify(in_a_row(kind, world, 1)).problems
    assert {problem.kind for problem in problems} == {"data race"}


@pytest.mark.parametrize("kind", KINDS)
def test_no_synchronisation_is_idle(kind: str) -> None:
    assert redundant(in_a_row(kind, 3, 2)) == []


def filled_ahead(rank: int, world: int, slots: int, behind: int) -> Plan:
    """Return a plan of `CALLS` gathers. Slots are filled on a separate stream while earlier gathers are in flight.

    Args:
        behind: a slot is filled after the gather that follows its last gather by this number of calls, and after the
            slot is copied out.
    """
    lives = {"input": Life.INPUT, "slots": Life.PERSISTENT, "output": Life.OUTPUT}
    plan = Builder("gathers", rank, world, stream="gather", buffers=lives, inputs={"input": CALLS})
    gathered: list[int] = []
    copied: list[int] = []
    for call in range(CALLS):
        first = call % slots * world
        last = call - slots
        after = [gathered[last + behind], copied[last]] if last >= 0 else []
        own = plan.here("slots", first + rank)
        filled = plan.add("publish", "fill", reads=[plan.here("input", call)], writes=[own], after=after)
        for peer in range(world):
            if peer != rank:
                plan.add("signal", "gather", after=[filled], peers=(peer,), channel=0, label="[ready]")
        for step in range(1, world):
            peer = (rank + step) % world
            plan.add("wait", "gather", peers=(peer,), channel=0, label="[ready]")
            source = Region("slots", peer, first + peer, first + peer + 1)
            pull = plan.add("pull", "gather", reads=[source], writes=[plan.here("slots", first + peer)])
        gathered.append(pull)
        whole, output = plan.here("slots", first, world), plan.here("output", call * world, world)
        copied.append(plan.add("pull", "compute", reads=[whole], writes=[output], after=[pull]))
    return plan.finish(plan.here("output", 0, CALLS * world))


def verified(world: int, slots: int, behind: int) -> Report:
    return verify([[filled_ahead(rank, world, slots, behind) for rank in range(world)]])


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_slot_may_be_filled_behind_the_call_after_the_one_that_used_it(world: int, slots: int) -> None:
    verified(world, slots, behind=1).raise_for_problems()


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_to_fill_it_behind_the_very_call_that_used_it_is_a_race(slots: int) -> None:
    assert {problem.kind for problem in verified(3, slots, behind=0).problems} == {"data race"}
