"""If a step fails, or an interrupt comes at any moment, every stream ends, and the streams can be used again."""

import random
import signal
import threading
import time

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_reduce_scatter
from symm_overlap.plan import InlineStreams, Step, ThreadStreams, execute

from .timelines import TWO, by_hand


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
    """The copy stream waits for a step that fails. Its wait must end, and the caller must not hang."""
    plan = by_hand(
        0, 1, Step("fork", "a"), Step("consume", "a"), Step("pull", "b", after=(1,)), Step("join", "a", after=(2,))
    )
    pulled = []

    def fail(step):
        time.sleep(0.05)
        raise RuntimeError("no result")

    with pytest.raises(RuntimeError, match="no result"):
        execute(plan, {"consume": fail, "pull": pulled.append}, streams)
    assert pulled == []


def test_no_step_runs_any_more_when_an_error_reaches_the_caller(streams):
    plan = by_hand(
        0, 1, Step("fork", "a"), Step("consume", "a"), Step("pull", "b", after=(0,)), Step("join", "a", after=(2,))
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
    assert pulled, "the error reaches the caller only after the pull, which uses the caller's memory"


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("caller_steps", [1, 0], ids=["in a step", "while it joins the others"])
def test_an_interrupt_ends_what_other_streams_wait_for(caller_steps):
    """The other stream waits for a peer that never comes. Only ``abandon`` can end this wait."""
    peer = threading.Event()
    plan = by_hand(
        0,
        1,
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


# If an interrupt comes in a callback of the garbage collector, Python only warns, and the interrupt is lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_ends_a_run_and_no_later_one(streams):
    """The interrupt may come between two steps, while a stream starts, just after a lock is acquired, or anywhere."""
    plan = produce_reduce_scatter(0, 3, chunks=2, compute=TWO)
    kinds = ("pull", "produce", "reduce", "signal", "wait", "sleep", "join")
    rng, interrupted, running = random.Random(0), 0, []

    def interrupt(signum, frame):
        raise Interrupted

    def step(step):
        if threading.current_thread() is threading.main_thread():  # interrupts arrive in this thread
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
    plan = by_hand(
        0, 1, Step("fork", "a"), Step("consume", "a"), Step("pull", "b", after=(0,)), Step("join", "a", after=(2,))
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
