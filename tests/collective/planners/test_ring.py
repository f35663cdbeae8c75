"""A gather that pulls into a ring: memory for few chunks, where each place is reused once its chunk is consumed."""

from dataclasses import replace

import pytest

from symm_overlap.collective.planners import all_gather_consume
from symm_overlap.plan import plan_calls, verify
from symm_overlap.plan.testing import redundant

from .cases import TWO, contracts_of
from .test_values import check_values

WAYS = [
    {"copy": copy, "compute": compute, "outbound": "compute0", **options}
    for copy, compute in (("copy", ("compute0",)), ("copy", TWO), ("compute0", ("compute0",)))
    for options in ({}, {"accumulate": True}, {"symmetric": True})
]


@pytest.mark.parametrize("ring", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_ring_holds_in_every_world_with_every_number_of_chunks(way, ring):
    for world in (1, 2, 5):
        for chunks in (1, 2, 3):
            calls = plan_calls(all_gather_consume, world, chunks=chunks, ring=ring, **way)
            contracts = contracts_of(calls, way.get("accumulate", False))
            verify(calls, graphs=True, contracts=contracts).raise_for_problems()
            plan = all_gather_consume(0, world, chunks=chunks, ring=ring, **way)
            assert plan.extents.get("gathered", 0) == min(ring, (world - 1) * chunks)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_ring_gives_the_values(way):
    for world, chunks in ((2, 3), (3, 1), (4, 2)):
        check_values(all_gather_consume, world, chunks, ring=2, **way)


def in_fewer(plan, places):
    """Return the plan with its chunks in fewer places of memory than it was made for."""

    def moved(region):
        start = region.start % places
        return region._replace(start=start, stop=start + 1) if region.buffer == "gathered" else region

    steps = (
        replace(step, reads=tuple(map(moved, step.reads)), writes=tuple(map(moved, step.writes))) for step in plan.steps
    )
    return replace(plan, steps=tuple(steps))


@pytest.mark.parametrize("compute", [("compute0",), TWO], ids=len)
@pytest.mark.parametrize("ring", [2, 3])
def test_one_place_fewer_is_a_race(ring, compute):
    """With one place less than the ring needs, the plan has a data race."""
    plans = [all_gather_consume(rank, 4, chunks=2, ring=ring, compute=compute) for rank in range(4)]
    assert verify([plans]).ok
    report = verify([[in_fewer(plan, ring - 1) for plan in plans]])
    assert not report.ok
    assert any("gathered" in str(problem) and "race" in str(problem) for problem in report.problems)


def test_every_dependency_of_a_ring_is_needed():
    for compute in (("compute0",), TWO):
        calls = plan_calls(all_gather_consume, 4, 2, chunks=2, ring=2, compute=compute, outbound="compute0")
        assert redundant(calls, ranks=[0], graphs=True) == []


def test_the_next_chunk_is_copied_while_one_is_consumed():
    plan = all_gather_consume(0, 4, ring=2)
    order = [(step.kind, step.chunk[0]) for step in plan.steps if step.kind in ("pull", "consume")]
    assert order == [
        *(("consume", 0), ("pull", 1), ("pull", 2), ("consume", 1)),
        *(("pull", 3), ("consume", 2), ("consume", 3)),
    ]


def test_a_ring_is_for_copies_that_nobody_keeps():
    """A ring is not used if the caller wants the gathered tensor or peers' memory is read in place."""
    for options in ({"keep": True}, {"in_place": True}):
        assert all_gather_consume(0, 4, ring=2, **options) == all_gather_consume(0, 4, **options)
    with pytest.raises(ValueError, match="ring is 0: there must be room for at least 1 chunk"):
        all_gather_consume(0, 4, ring=0)
