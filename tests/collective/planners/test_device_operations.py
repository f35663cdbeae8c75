"""The number of operations that the plans of a GPU issue, besides matmuls and copies.

Each step that signals, waits, sleeps, announces or reduces is one launch. A call ends with one more launch, which
poisons its outputs if a wait has failed. Events between streams are counted separately: recording an event or waiting
for one launches nothing, but needs a call of the host.
"""

from collections import Counter

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_all_reduce, produce_reduce_scatter
from symm_overlap.plan import kind

from .cases import TWO

GATHER = {"outbound": "compute0"}
POISON = 1

# (planner, arguments, world, chunks): matmuls, copies, launches, events recorded, waits for events.
COUNTS = [
    ((all_gather_consume, GATHER, 2, 1), (2, 2, 3, 3, 3)),
    ((all_gather_consume, GATHER, 2, 2), (4, 4, 5, 6, 6)),
    ((all_gather_consume, GATHER, 8, 1), (8, 8, 9, 9, 9)),
    ((all_gather_consume, GATHER, 8, 2), (16, 16, 17, 18, 18)),
    ((produce_reduce_scatter, {}, 2, 1), (2, 1, 5, 3, 3)),
    ((produce_reduce_scatter, {}, 2, 2), (4, 2, 8, 6, 6)),
    ((produce_reduce_scatter, {}, 8, 1), (8, 7, 17, 9, 9)),
    ((produce_reduce_scatter, {}, 8, 2), (16, 14, 32, 18, 18)),
    ((produce_all_reduce, {}, 2, 1), (2, 2, 7, 5, 5)),
    ((produce_all_reduce, {}, 2, 2), (4, 4, 12, 8, 8)),
    ((produce_all_reduce, {}, 8, 1), (8, 14, 19, 11, 11)),
    ((produce_all_reduce, {}, 8, 2), (16, 28, 36, 20, 20)),
]


def counted(plan):
    """Return the numbers of matmuls, copies, other launches, recorded events and waits for events."""
    roles = Counter(
        "matmul" if step.kind in ("produce", "consume") else "copy" if kind(step.kind).role == "copy" else "launch"
        for step in plan.steps[1:-1]
    )
    waits = sum(len(item.waits) for item in plan.program.items)
    return roles["matmul"], roles["copy"], roles["launch"] + POISON, plan.program.events, waits


@pytest.mark.parametrize(
    ("case", "counts"), COUNTS, ids=lambda case: f"{case[0].__name__}-{case[2]}-{case[3]}" if callable(case[0]) else ""
)
def test_how_many_operations_a_call_is(case, counts):
    planner, arguments, world, chunks = case
    for rank in {0, world - 1}:
        assert counted(planner(rank, world, chunks=chunks, compute=TWO, **arguments)) == counts


@pytest.mark.parametrize(
    ("planner", "arguments"),
    [
        (all_gather_consume, GATHER),
        (all_gather_consume, {**GATHER, "keep": True}),
        (all_gather_consume, {**GATHER, "symmetric": True}),
        (all_gather_consume, {**GATHER, "ring": 2}),
        (produce_reduce_scatter, {}),
        (produce_all_reduce, {}),
    ],
)
def test_eight_ranks_need_no_more_than_24_launches_beside_matmuls_and_copies(planner, arguments):
    launches = counted(planner(3, 8, compute=TWO, **arguments))[2]
    assert launches <= 24
