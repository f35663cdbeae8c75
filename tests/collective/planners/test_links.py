"""Links in the simulator: two copies into or out of one rank wait for each other. Our plans avoid such contention."""

from dataclasses import replace

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_all_reduce, produce_reduce_scatter
from symm_overlap.plan import (
    Costs,
    Region,
    Step,
    plan_calls,
    simulate,
    verify,
)
from tests.plan.timelines import COMPUTES, COSTS, SEEDS, TWO, WORLD, by_hand

FORK = Step("fork", "s")

AS_LONG = Costs(compute=1.0, copy=1.0, overhead=0.1, tail=0.0, meet=0.001)
"""Copies take as long as matmuls. Longer copies could not be hidden."""


def copy(source, target, stream="s"):
    """Return a copy between two ranks or within one. The rank whose plan contains the step runs the copy."""
    reads, writes = (Region("x", source, 0, 1),), (Region("y", target, 0, 1),)
    return Step("pull", stream, reads, writes, after=() if stream == "s" else (0,))


def run_copies(*ranks, **arguments):
    """Simulate a rank for each list of copies. Return {(rank, index in the list): (start, end)} of the copies."""
    plans = [by_hand(rank, len(ranks), FORK, *copies) for rank, copies in enumerate(ranks)]
    timeline = simulate([plans], **({"costs": Costs(copy=1.0)} | arguments))
    return {
        (event.at.rank, event.at.index - 1): (event.start, event.end)
        for event in timeline.events
        if event.at.step.kind == "pull"
    }


def waited_for_links(timeline):
    """Return how long copies waited. One stream has all copies of a rank, so none of them waits for an engine."""
    copies = [event for event in timeline.events if event.at.step.kind in ("publish", "pull")]
    assert len({(event.at.rank, event.at.step.stream) for event in copies}) == len({event.at.rank for event in copies})
    return sum(event.waited for event in copies)


def in_rank_order(plan):
    """Return the same all-gather, except that every rank handles its peers' shards in the order of their ranks."""

    def owner(index):
        step = plan.steps[index]
        if step.kind == "join":
            return plan.world
        return step.chunk[0] if step.chunk is not None and step.chunk[0] != plan.rank else -1

    order = sorted(range(len(plan.steps)), key=owner)
    steps = [plan.steps[index] for index in order]
    steps = [replace(step, after=tuple(sorted(map(order.index, step.after)))) for step in steps]
    others = [index for index, step in enumerate(steps) if step.stream != steps[-1].stream]
    steps[-1] = replace(steps[-1], after=tuple(others))  # the last step of each stream has changed
    return replace(plan, steps=tuple(steps))


@pytest.mark.parametrize("on_sms", [COMPUTES, COMPUTES | {"pull"}])
def test_two_ranks_that_pull_from_one_peer_take_twice_as_long_as_from_two(on_sms):
    apart = run_copies([copy(2, 0)], [copy(3, 1)], [], [], on_sms=on_sms)
    assert apart == {(0, 0): (0.0, 1.0), (1, 0): (0.0, 1.0)}
    assert sorted(run_copies([copy(2, 0)], [copy(2, 1)], [], [], on_sms=on_sms).values()) == [(0, 1), (1, 2)]


def test_two_ranks_that_push_to_one_peer_share_its_way_in():
    assert run_copies([copy(0, 2)], [copy(1, 3)], [], []) == {(0, 0): (0.0, 1.0), (1, 0): (0.0, 1.0)}
    assert run_copies([copy(0, 2)], [copy(1, 2)], [], []) == {(0, 0): (0.0, 1.0), (1, 0): (1.0, 2.0)}


def test_a_pull_and_a_push_meet_on_a_link_too():
    into_0 = run_copies([copy(1, 0)], [], [copy(2, 0)])
    assert into_0 == {(0, 0): (0.0, 1.0), (2, 0): (1.0, 2.0)}
    out_of_0 = run_copies([copy(0, 1)], [], [copy(0, 2)])
    assert out_of_0 == {(0, 0): (0.0, 1.0), (2, 0): (1.0, 2.0)}


def test_the_ways_in_and_out_are_apart():
    """A rank can receive one copy and send another at the same time."""
    assert set(run_copies([copy(1, 0)], [copy(2, 1)], [copy(0, 2)]).values()) == {(0.0, 1.0)}


def test_a_copy_within_a_rank_uses_no_link():
    assert set(run_copies([copy(1, 0)], [copy(1, 1)], [copy(0, 2)]).values()) == {(0.0, 1.0)}


def test_a_copy_that_waits_for_one_link_does_not_hold_the_other():
    times = run_copies([copy(2, 0)], [copy(2, 1)], [], [copy(3, 1)])
    assert times[3, 0] == (0.0, 1.0), "rank 1 waits for the link out of rank 2, so it must not hold its own link in"
    assert times[1, 0] == (1.0, 2.0)


def test_a_copy_that_waits_for_a_link_holds_up_those_behind_it_on_its_engine():
    times = run_copies([copy(2, 0)], [copy(2, 1), copy(1, 1, "t")], [])
    assert times == {(0, 0): (0.0, 1.0), (1, 0): (1.0, 2.0), (1, 1): (2.0, 3.0)}


def test_a_link_goes_to_who_asked_first_not_to_the_lower_rank():
    def costs(rank, step):
        return float(step.kind == "pull" and 1 + rank), 0.0

    times = run_copies([copy(0, 0), copy(3, 0)], [copy(3, 1)], [copy(3, 2)], [], costs=costs)
    assert times == {(0, 0): (0.0, 1.0), (1, 0): (0.0, 2.0), (2, 0): (2.0, 5.0), (0, 1): (5.0, 6.0)}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("compute", [TWO[:1], TWO])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_neighbours_first_gathers_without_contention_and_rank_0_first_does_not(world, compute, chunks):
    (plans,) = plan_calls(all_gather_consume, world, 1, compute=compute, chunks=chunks)
    jammed = [in_rank_order(plan) for plan in plans]
    assert verify([jammed]).ok
    for seed in SEEDS:
        ours, theirs = (simulate([each], AS_LONG, seed=seed) for each in (plans, jammed))
        assert waited_for_links(ours) == pytest.approx(0.0)
        assert ours.exposed < 1.1, "only publishing may be exposed"
        if world > 2:  # otherwise the orders are the same
            assert waited_for_links(theirs) > 1.0
            assert theirs.makespan > ours.makespan + (world - 2) * 0.9


@pytest.mark.parametrize("planner", [produce_reduce_scatter, produce_all_reduce])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("compute", [TWO[:1], TWO])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_our_reductions_have_no_contention(planner, world, compute, chunks):
    calls = plan_calls(planner, world, 1, compute=compute, chunks=chunks)
    for seed in SEEDS:
        assert waited_for_links(simulate(calls, AS_LONG, seed=seed)) == pytest.approx(0.0)


def test_a_seed_gives_the_same_timeline_again_where_links_are_contended():
    calls = [[in_rank_order(plan) for plan in plan_calls(all_gather_consume, WORLD, 1, compute=TWO, sleep=False)[0]]]
    on_sms = COMPUTES | {"publish", "pull"}
    once, again = ([simulate(calls, COSTS, seed=seed, on_sms=on_sms) for seed in SEEDS] for _ in range(2))
    assert once == again
    assert all(waited_for_links(timeline) > 0.3 for timeline in once)
    assert len({timeline.makespan for timeline in once}) > 1
