"""Executing a plan: the order of steps, dependencies between streams, threads, and the cost of issuing."""

import sys
import threading
import time

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_reduce_scatter
from symm_overlap.plan import (
    InlineStreams,
    Step,
    ThreadStreams,
    execute,
)
from symm_overlap.plan.testing import delayed

from .timelines import TWO, by_hand


def test_inline_runs_every_step_in_the_plans_order():
    plan = all_gather_consume(0, 3, chunks=2, compute=TWO)
    seen = []
    execute(
        plan, dict.fromkeys(("publish", "pull", "consume", "signal", "wait", "sleep"), seen.append), InlineStreams()
    )
    assert seen == [step for step in plan.steps if step.kind not in ("fork", "join")]


@pytest.mark.parametrize("seed", range(5))
def test_threads_keep_the_order_of_each_stream_and_every_dependency(streams, seed):
    plan = produce_reduce_scatter(0, 4, chunks=2, compute=TWO)
    done = []
    kinds = ("pull", "produce", "reduce", "signal", "wait", "sleep", "fork", "join")
    table = delayed(dict.fromkeys(kinds, lambda step: done.append((step, threading.current_thread().name))), seed, 0)
    execute(plan, table, streams)
    order = [step for step, _ in done]
    assert sorted(order, key=plan.steps.index) == list(plan.steps)
    for name in plan.streams:
        assert [step for step in order if step.stream == name] == [step for step in plan.steps if step.stream == name]
    for step in plan.steps:
        for earlier in step.after:
            assert order.index(plan.steps[earlier]) < order.index(step)
    for step, thread in done:
        assert thread == (f"stream {step.stream}" if step.stream != "compute0" else threading.current_thread().name)


def test_streams_run_at_the_same_time(streams):
    meet = threading.Barrier(2, timeout=10)
    plan = by_hand(
        0, 1, Step("fork", "a"), Step("consume", "a"), Step("pull", "b", after=(0,)), Step("join", "a", after=(2,))
    )
    execute(plan, {"consume": lambda step: meet.wait(), "pull": lambda step: meet.wait()}, streams)


def test_threads_are_kept_from_call_to_call_and_end_when_closed(streams):
    plan = all_gather_consume(0, 1, keep=True)
    ran_on = []
    for _ in range(3):
        execute(plan, {"pull": lambda step: ran_on.append(threading.current_thread())}, streams)
    assert len(set(ran_on)) == 1
    streams.close()
    ran_on[0].join(timeout=10)
    assert not ran_on[0].is_alive()
    execute(plan, {"pull": lambda step: ran_on.append(threading.current_thread())}, streams)
    assert ran_on[-1] is not ran_on[0], "streams that were closed start again"


def test_threads_end_with_the_streams_they_belong_to():
    """The threads end when the ThreadStreams object is deleted."""
    streams, ran_on = ThreadStreams(), []
    execute(
        all_gather_consume(0, 1, keep=True), {"pull": lambda step: ran_on.append(threading.current_thread())}, streams
    )
    assert ran_on[0] is not threading.current_thread()
    del streams
    ran_on[0].join(timeout=10)
    assert not ran_on[0].is_alive()


def test_each_thread_enters_the_context_it_was_given():
    inside = threading.local()

    class Context:
        def __enter__(self):
            inside.yes = True

        def __exit__(self, *error):
            return None

    streams = ThreadStreams(Context)
    seen = []
    execute(all_gather_consume(0, 1, keep=True), {"pull": lambda step: seen.append(inside.yes)}, streams)
    streams.close()
    assert seen == [True]


def test_calls_from_several_threads_take_turns(streams):
    plan = all_gather_consume(0, 1, chunks=3, keep=True)
    running, overlaps = set(), []

    def caller():
        mine = object()

        def consume(step):
            running.add(mine)
            overlaps.append(len(running))
            time.sleep(0.001)
            running.discard(mine)

        for _ in range(5):
            execute(plan, {"consume": consume}, streams)

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert overlaps == [1] * 60


def test_delays_depend_on_seed_rank_and_step_only(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    plan = all_gather_consume(0, 4, chunks=2)
    kinds = ("publish", "pull", "consume", "signal", "wait")

    def pauses_of(seed, rank):
        pauses.clear()
        execute(plan, delayed(dict.fromkeys(kinds, lambda step: None), seed, rank), InlineStreams())
        return list(pauses)

    assert pauses_of(1, 0) == pauses_of(1, 0)
    assert pauses_of(1, 0) != pauses_of(2, 0)
    assert pauses_of(1, 0) != pauses_of(1, 1)
    assert 0 < len(pauses_of(1, 0)) < len(plan.steps)


def test_issuing_a_cached_plan_calls_nothing_but_the_functions_of_the_table_for_a_step():
    """On one stream, the executor adds only a loop. `bench.plan_issue` measures this loop, and threads."""
    table = dict.fromkeys(("publish", "pull", "consume", "signal", "wait"), lambda step: None)
    plan, streams = all_gather_consume(0, 8, chunks=4, copy="compute0"), InlineStreams()
    execute(plan, table, streams)
    entered = []

    def note(frame, event, _):
        if event == "call":
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        execute(plan, table, streams)
    finally:
        sys.setprofile(None)
    assert sorted({name for name in entered if name != "<lambda>"}) == ["execute", "run"]
    assert len([name for name in entered if name != "<lambda>"]) == 2
