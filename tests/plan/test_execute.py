"""Issuing a plan: order, events, errors and cost."""

import random
import signal
import threading
import time

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_reduce_scatter
from symm_overlap.plan import (
    InlineStreams,
    Plan,
    Step,
    ThreadStreams,
    execute,
)
from symm_overlap.plan.testing import delayed

TWO = ("compute0", "compute1")


def make_plan(*steps: Step) -> Plan:
    return Plan("made_by_hand", 0, 1, steps)


@pytest.fixture
def streams():
    streams = ThreadStreams()
    yield streams
    streams.close()


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
    plan = make_plan(
        Step("fork", "a"), Step("consume", "a"), Step("pull", "b", after=(0,)), Step("join", "a", after=(2,))
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
    streams, ran_on = ThreadStreams(), []
    execute(
        all_gather_consume(0, 1, keep=True), {"pull": lambda step: ran_on.append(threading.current_thread())}, streams
    )
    assert ran_on[0] is not threading.current_thread()
    del streams
    ran_on[0].join(timeout=10)
    assert not ran_on[0].is_alive()


@pytest.mark.parametrize("failing", ["compute0", "compute1", "copy"])
def test_an_error_in_any_stream_stops_the_others_and_reaches_the_caller(streams, failing):
    plan = produce_reduce_scatter(0, 4, chunks=2, compute=TWO)
    steps = [step for step in plan.steps if step.stream == failing and step.kind not in ("fork", "join", "sleep")]
    ran = []

    def run(step):
        if step is steps[1]:
            raise ValueError("broken on purpose")
        ran.append(step)

    with pytest.raises(ValueError, match="broken on purpose") as caught:
        execute(plan, dict.fromkeys(("produce", "pull", "reduce", "signal", "wait"), run), streams)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert str(steps[1]) in text
    assert not any(step.kind == "reduce" and step.stream == failing for step in ran)
    ran.clear()
    execute(plan, dict.fromkeys(("produce", "pull", "reduce", "signal", "wait"), ran.append), streams)
    assert len(ran) == sum(step.kind not in ("fork", "join", "sleep") for step in plan.steps), "the streams still work"


def test_an_error_reaches_a_stream_that_waits_for_an_event(streams):
    """The copy stream waits for a step that never completes; it must be let go, and the caller must not hang."""
    plan = make_plan(
        Step("fork", "a"), Step("consume", "a"), Step("pull", "b", after=(1,)), Step("join", "a", after=(2,))
    )
    pulled = []

    def fail(step):
        time.sleep(0.05)
        raise RuntimeError("no result")

    with pytest.raises(RuntimeError, match="no result"):
        execute(plan, {"consume": fail, "pull": pulled.append}, streams)
    assert pulled == []


def test_no_step_runs_any_more_when_an_error_reaches_the_caller(streams):
    plan = make_plan(
        Step("fork", "a"), Step("consume", "a"), Step("pull", "b", after=(0,)), Step("join", "a", after=(2,))
    )
    pulling, pulled = threading.Event(), []

    def pull(step):
        pulling.set()
        time.sleep(0.1)
        pulled.append(step)

    def fail(step):
        pulling.wait(10)
        raise RuntimeError("no result")

    with pytest.raises(RuntimeError, match="no result"):
        execute(plan, {"consume": fail, "pull": pull}, streams)
    assert pulled, "the caller's memory is in use until the pull is over"


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("caller_steps", [1, 0], ids=["in a step", "while it joins the others"])
def test_an_interrupt_ends_what_other_streams_wait_for(caller_steps):
    """The other stream waits for a peer that never comes; only the abandoned wait can end."""
    peer = threading.Event()
    plan = make_plan(
        Step("fork", "a"),
        *[Step("consume", "a")] * caller_steps,
        Step("wait", "b", after=(0,)),
        Step("pull", "b"),
    )
    pulled = []

    def wait(step):
        assert peer.wait(10)
        raise RuntimeError("abandoned")

    def interrupt(signum, frame):
        raise Interrupted

    streams = ThreadStreams(abandon=peer.set)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            execute(plan, {"consume": lambda step: time.sleep(10), "wait": wait, "pull": pulled.append}, streams)
        assert peer.is_set()
        assert not pulled
        execute(plan, {"pull": pulled.append}, streams)
        assert pulled, "the streams still work"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        streams.close()


def test_an_interrupt_at_any_moment_ends_a_run_and_no_later_one(streams):
    """Between two steps, while a stream is being started, when the last lock has just been taken: wherever it comes."""
    plan = produce_reduce_scatter(0, 3, chunks=2, compute=TWO)
    kinds = ("pull", "produce", "reduce", "signal", "wait", "sleep", "join")
    rng, interrupted, running = random.Random(0), 0, []

    def interrupt(signum, frame):
        raise Interrupted

    def step(step):
        if threading.current_thread() is threading.main_thread():  # where the interrupts come
            return
        running.append(step)
        sum(range(rng.randrange(1000)))
        running.remove(step)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(2000):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 6e-4))
                execute(plan, dict.fromkeys(kinds, step), streams)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupted += 1
            assert not running
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 100
    done = []
    execute(plan, dict.fromkeys(kinds, done.append), streams)
    assert len(done) == len(plan.steps) - 1


def test_the_first_of_two_errors_is_the_one_raised(streams):
    plan = make_plan(
        Step("fork", "a"), Step("consume", "a"), Step("pull", "b", after=(0,)), Step("join", "a", after=(2,))
    )
    failed = threading.Event()

    def first(step):
        try:
            raise KeyError("first")
        finally:
            failed.set()

    def second(step):
        failed.wait(10)
        time.sleep(0.05)
        raise KeyError("second")

    with pytest.raises(KeyError, match="first"):
        execute(plan, {"consume": second, "pull": first}, streams)


def test_inline_names_the_step_of_an_error():
    plan = all_gather_consume(0, 1)
    with pytest.raises(ZeroDivisionError) as caught:
        execute(plan, {"consume": lambda step: 1 / 0}, InlineStreams())
    assert "consume chunk 0.0 on compute0" in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


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


@pytest.mark.parametrize("make", [InlineStreams, ThreadStreams])
def test_issuing_a_cached_plan_costs_less_than_a_microsecond_a_step(make):
    """What the executor adds to the functions it calls: the best of many runs, for others use the machine too."""
    streams = make()
    copy = "compute0" if make is InlineStreams else "copy"
    table = dict.fromkeys(("publish", "pull", "consume", "signal", "wait"), lambda step: None)
    plan = all_gather_consume(0, 8, chunks=4, copy=copy)
    execute(plan, table, streams)
    best = float("inf")
    for _ in range(300):
        start = time.perf_counter()
        execute(all_gather_consume(0, 8, chunks=4, copy=copy), table, streams)
        best = min(best, time.perf_counter() - start)
    assert best / len(plan.steps) <= 1e-6, f"{best / len(plan.steps) * 1e9:.0f} ns a step"
