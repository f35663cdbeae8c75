"""Which barriers are needed between replayed CUDA graphs and calls that the host issues, in every order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_reduce_scatter
from symm_overlap.plan import Plan, plan_calls, verify
from symm_overlap.plan.builder import Builder
from symm_overlap.plan.verify import Report

WORLD = 2
EAGER = 0
GRAPHS = (1, 2, 3)  # number of calls in each graph
ORDERS = list(product((EAGER, *GRAPHS), repeat=4))


@cache
def barrier() -> list[Plan]:
    """Return a call that consists of a barrier only, on a channel that no plan uses."""
    plans = []
    for rank in range(WORLD):
        plan = Builder("barrier", rank, WORLD, stream="compute0", buffers={}, inputs={})
        plan.add("barrier", "compute0", channel=9)
        plans.append(plan.finish())
    return plans


@cache
def call(number: int) -> list[Plan]:
    return plan_calls((all_gather_consume, produce_reduce_scatter)[number % 2], WORLD, 1)[0]


def proof(order: Sequence[int], *, ahead_of_graphs: bool = True, behind_replays: bool = True) -> Report:
    """Verify events in this order. An event is a call of the host (0) or the replay of a graph with so many calls.

    Args:
        ahead_of_graphs: whether there is a barrier before a graph's first call.
        behind_replays: whether there is a barrier before a call of the host that follows a replay.
    """
    calls, halves = [], []
    issued, replayed = 0, False
    for event in order:
        turns = range(event) if event else [issued]
        if ahead_of_graphs if event else (replayed and behind_replays):
            calls.append(barrier())
            halves.append(0)  # any value: a barrier uses no half
        replayed = bool(event)
        issued += not event
        for turn in turns:
            calls.append(call(len(calls)))
            halves.append(turn % 2)
    return verify(calls, halves, graphs=True)


def test_graphs_and_calls_of_the_host_hold_in_every_order() -> None:
    for order in ORDERS:
        proof(order).raise_for_problems()


@pytest.mark.parametrize("left_out", ["ahead_of_graphs", "behind_replays"])
def test_neither_barrier_can_be_left_out(left_out: str) -> None:
    refused = [order for order in ORDERS if not proof(order, **{left_out: False}).ok]
    assert refused
    assert all(any(order) for order in refused), "calls of the host alone need no barrier"
