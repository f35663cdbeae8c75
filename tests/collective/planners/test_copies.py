"""Plans with two copy streams: ranks need not agree on the number of copy streams, and the second one starts late."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from symm_overlap.collective.planners import (
    all_gather_consume,
    fused_all_gather_matmul,
    fused_matmul_all_reduce,
    fused_matmul_reduce_scatter,
    produce_all_reduce,
    produce_reduce_scatter,
)
from symm_overlap.plan import Plan, verify

from .cases import TWO, case_id, contracts_of

CASES: list[tuple[Callable[..., Plan], dict[str, Any]]] = [
    (all_gather_consume, {"compute": TWO}),
    (all_gather_consume, {"compute": TWO, "outbound": "compute0", "keep": True}),
    (all_gather_consume, {"compute": TWO, "symmetric": True}),
    (produce_reduce_scatter, {"compute": TWO}),
    (produce_all_reduce, {"compute": TWO}),
    (fused_all_gather_matmul, {}),
    (fused_matmul_reduce_scatter, {}),
    (fused_matmul_all_reduce, {}),
]


@pytest.mark.parametrize(("planner", "options"), CASES, ids=case_id)
def test_ranks_may_have_different_numbers_of_copy_streams(
    planner: Callable[..., Plan], options: dict[str, Any]
) -> None:
    """The number depends on the sizes of a call, and some sizes may differ between ranks."""
    for world, chunks in itertools.product((2, 3, 4), (1, 2)):
        for copies in itertools.product((1, 2), repeat=world):
            plans = [planner(rank, world, chunks=chunks, copies=copies[rank], **options) for rank in range(world)]
            found = verify([plans] * 3, graphs=True, contracts=contracts_of([plans] * 3))
            assert found.ok, f"{planner.__name__}, {chunks} chunks, copy streams {copies}: {found}"


@pytest.mark.parametrize(("planner", "options"), CASES, ids=case_id)
def test_peers_take_turns_and_the_second_stream_follows_the_first_copy(
    planner: Callable[..., Plan], options: dict[str, Any]
) -> None:
    plan = planner(0, 5, chunks=2, copies=2, **options)
    steps = [step for step in plan.steps if step.kind in ("pull", "push") and step.chunk and step.chunk[0] != 0][:8]
    streams = {step.chunk[0]: step.stream for step in steps if step.chunk}
    assert list(streams.values()) == ["copy", "copy1", "copy", "copy1"]
    assert all(step.chunk and step.stream == streams[step.chunk[0]] for step in steps)
    first, second = (next(step for step in steps if step.stream == name) for name in ("copy", "copy1"))
    assert plan.steps.index(first) in second.after
