"""A CUDA graph may choose the order of independent steps. Some plans are free of deadlocks in every order, some not."""

import random
from dataclasses import replace

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_reduce_scatter
from symm_overlap.collective.planners.published import torch_all_gather_matmul, torch_matmul_reduce_scatter
from symm_overlap.plan import Step, plan_calls, verify

from .timelines import by_hand

TWO = ("compute0", "compute1")


def meeting(world, after):
    """Every rank signals its previous neighbour on one stream, and waits for its next neighbour on another stream.

    ``after``: whether the wait must come after the rank's own signal.
    """
    plans = []
    for rank in range(world):
        signal = Step("signal", "s", peers=((rank - 1) % world,), channel=0)
        wait = Step("wait", "t", peers=((rank + 1) % world,), channel=0, after=(1,) if after else (0,))
        plans.append(by_hand(rank, world, Step("fork", "s"), signal, wait, Step("join", "s", after=(2,))))
    return [plans]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_wait_that_need_not_follow_the_own_signal_can_deadlock_a_graph(world):
    """If the steps run in the order of issue, or on concurrent streams, they cannot deadlock, but a graph can."""
    calls = meeting(world, after=False)
    assert verify(calls).ok
    (problem,) = verify(calls, graphs=True).problems
    assert problem.kind == "graph deadlock"
    assert sorted((at.rank, at.step.kind) for at in problem.steps) == [(rank, "wait") for rank in range(world)]
    assert verify(meeting(world, after=True), graphs=True).ok


def test_a_rank_that_must_signal_first_breaks_the_ring():
    careless, careful = meeting(3, after=False)[0], meeting(3, after=True)[0]
    assert verify([[careful[0], *careless[1:]]], graphs=True).ok


def test_the_calls_of_one_graph_are_in_order():
    """The calls of one graph run one after another, so a repeated plan adds no deadlock."""
    verify(meeting(3, after=True) * 3, graphs=True).raise_for_problems()
    assert not verify(meeting(3, after=True) + meeting(3, after=False), graphs=True).ok


@pytest.mark.parametrize("world", [2, 3, 8])
def test_torchs_reduce_scatter_relies_on_the_order_of_issue(world):
    """Its barriers are on two streams without dependencies between them. On different ranks, a graph may start
    different barriers first.
    """
    report = verify(plan_calls(torch_matmul_reduce_scatter, world, 1), graphs=True)
    assert [problem.kind for problem in report.problems] == (["graph deadlock"] if world > 2 else [])
    verify(plan_calls(torch_all_gather_matmul, world, 3), graphs=True).raise_for_problems()


@pytest.mark.parametrize("planner", [all_gather_consume, produce_reduce_scatter])
def test_our_plans_without_the_dependencies_of_their_waits_can_deadlock_a_graph(planner):
    def careless(plan):
        return replace(
            plan, steps=tuple(replace(s, after=(0,)) if s.kind == "wait" and s.after else s for s in plan.steps)
        )

    outbound = {"outbound": "compute0"} if planner is all_gather_consume else {}
    (plans,) = plan_calls(planner, 3, 1, compute=TWO, **outbound)
    verify([plans], graphs=True).raise_for_problems()
    changed = [[careless(plan) for plan in plans]]
    assert verify(changed).ok
    assert [problem.kind for problem in verify(changed, graphs=True).problems] == ["graph deadlock"]


def random_call(source):
    """Return plans of two or three ranks with two streams each. In the order of issue, they cannot deadlock."""
    world = source.choice([2, 3])
    steps = [[Step("fork", "s")] for _ in range(world)]

    def add(rank, kind, peer, channel):
        own = steps[rank]
        stream = source.choice("st")
        last = max((index for index, step in enumerate(own) if step.stream == stream), default=None)
        others = [index for index, step in enumerate(own) if step.stream != stream]
        after = {index for index in others if source.random() < 0.3} | (set() if last is not None else {0})
        own.append(Step(kind, stream, peers=(peer,), channel=channel, after=tuple(sorted(after & set(others)))))

    for channel in range(source.choice([2, 3, 4])):
        sender, receiver = source.sample(range(world), 2)
        add(sender, "signal", receiver, channel)
        add(receiver, "wait", sender, channel)
    for own in steps:
        own.append(Step("join", "s", after=tuple(index for index, step in enumerate(own) if step.stream == "t")))
    return [by_hand(rank, world, *own) for rank, own in enumerate(steps)]


def can_deadlock(plans):
    """Return whether ranks that run one step at a time, in any order that the dependencies allow, can deadlock.

    Tries all orders. A state has, for each rank, the steps that it has done and the wait that it has started.
    """
    needs = []
    for plan in plans:
        before = {}
        for index, step in enumerate(plan.steps):
            same = [earlier for earlier in range(index) if plan.steps[earlier].stream == step.stream]
            before[index] = {*step.after, *same[-1:]}
        needs.append(before)
    sent = {
        (plan.rank, step.peer, step.channel): (plan.rank, index)
        for plan in plans
        for index, step in enumerate(plan.steps)
        if step.kind == "signal"
    }
    seen, ahead = set(), [tuple((frozenset(), None) for _ in plans)]
    while ahead:
        state = ahead.pop()
        if state in seen:
            continue
        seen.add(state)
        following = []
        for plan in plans:
            done, started = state[plan.rank]
            ready = (
                [started]
                if started is not None
                else [n for n in needs[plan.rank] if n not in done and needs[plan.rank][n] <= done]
            )
            for index in ready:
                step = plan.steps[index]
                comes = True
                if step.kind == "wait":
                    rank, signal = sent[step.peer, plan.rank, step.channel]
                    comes = signal in state[rank][0]
                mine = (done | {index}, None) if comes else (done, index)
                following.append((*state[: plan.rank], mine, *state[plan.rank + 1 :]))
        following = [each for each in following if each != state]
        if not following and any(len(done) < len(plan.steps) for (done, _), plan in zip(state, plans, strict=True)):
            return True
        ahead += following
    return False


def test_the_condition_agrees_with_trying_every_order():
    """A plan without problems never deadlocks. A problem whose ring has one wait per rank is a real deadlock."""
    found = {True: 0, False: 0}
    for seed in range(150):
        plans = random_call(random.Random(seed))
        assert verify([plans]).ok, seed
        problems = verify([plans], graphs=True).problems
        stuck = can_deadlock(plans)
        if not problems:
            assert not stuck, seed
        elif len({at.rank for at in problems[0].steps}) == len(problems[0].steps):
            assert stuck, seed
        found[stuck] += 1
    assert min(found.values()) > 20, "both results occur"
