"""Plans of training steps are free of races and deadlocks, the proof finds planted faults, and plans are timed."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from symm_overlap.fsdp.prefetch.issue_order import (
    AWAIT_REDUCE,
    DEFAULT,
    RELEASE,
    WAIT_OPTIMIZER,
    Issue,
    Prefetch,
    issue_order,
)
from symm_overlap.fsdp.prefetch.kinds import BACKWARD, COPY_IN, FORWARD, GATHER, RESHARD
from symm_overlap.fsdp.prefetch.lists import counts_of, lists, starts_of
from symm_overlap.fsdp.prefetch.policy import Bytes, Depth
from symm_overlap.fsdp.prefetch.search import predict, search
from symm_overlap.fsdp.prefetch.step_plan import Options, StepPlan, peak_bytes, step_plan
from symm_overlap.fsdp.prefetch.trace import Layer, Trace, layers_in_a_row
from symm_overlap.plan import Report, draw, simulate, verify


def trace(
    forward: tuple[float, ...] = (2, 2, 8, 2), gather: float | tuple[float, ...] = 1, order: tuple[int, ...] = ()
) -> Trace:
    """Return the trace of layers whose backward takes twice as long as their forward."""
    gathers = gather if isinstance(gather, tuple) else (gather,) * len(forward)
    layers = [Layer(f"L{index}", nbytes=1, gather=each, reduce=each) for index, each in enumerate(gathers)]
    return layers_in_a_row(layers, forward, [2 * each for each in forward], order or None, optimizer=1)


def with_policy(of: Trace, policy: Depth | Bytes) -> Prefetch:
    starts = starts_of(of)
    return lists(of, starts, counts_of(of, starts, policy))


def proven(of: Trace, issued: list[Issue], options: Options | None = None, world: int = 2, calls: int = 3) -> Report:
    made = StepPlan(of, issued, options or Options())
    return verify([[made.for_rank(rank, world) for rank in range(world)]] * calls)


ORDERS = [(), (0, 2), (0, 1, 0, 2, 3), (0, 0, 0, 1), (0, 1, 2, 3, 0, 1, 2, 3), (3, 2, 1, 0)]


@pytest.mark.parametrize("order", ORDERS)
def test_every_step_is_free_of_races_and_deadlocks(order: tuple[int, ...]) -> None:
    of = trace(order=order)
    for depth, event, one in itertools.product((None, 0, 1, 2, 9), (False, True), (False, True)):
        prefetch = DEFAULT if depth is None else with_policy(of, Depth(depth))
        options = Options(rounds=2, event=event, other=1.0, one_communicator=one)
        report = proven(of, issue_order(of, prefetch), options)
        assert report.ok, report


def moved(issued: list[Issue], what: Issue, before: Issue) -> list[Issue]:
    """Return what is issued, with the first ``what`` moved to right before the first ``before``."""
    left = list(issued)
    left.remove(what)
    left.insert(left.index(before), what)
    return left


def problems(report: Report) -> set[str]:
    return {problem.kind for problem in report.problems}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_reshard_ahead_of_its_compute_is_a_use_after_free(depth: int) -> None:
    of = trace()
    issued = issue_order(of, with_policy(of, Depth(depth)))
    for compute in (Issue(FORWARD, 1, 2), Issue(BACKWARD, 1, 4)):
        begins = issued.index(compute)
        changed = issued[:begins] + moved(issued[begins:], Issue(RESHARD, 1), compute)
        report = proven(of, changed)
        assert problems(report) == {"use after free"}
        assert compute.what in str(report)
        assert "L1" in str(report)


def test_a_reshard_on_a_stream_that_does_not_wait_for_compute_is_a_race() -> None:
    of = trace()
    plan = step_plan(of).plan
    # The reshard is on the reduce stream, before its own layer's reduce-scatter. That stream has not waited for the
    # copy-in yet.
    steps = tuple(replace(step, stream="reduce") if step.kind == RESHARD else step for step in plan.steps)
    assert "data race" in problems(verify([[replace(plan, steps=steps)]]))


@pytest.mark.parametrize(("what", "kind"), [(RELEASE, GATHER), (AWAIT_REDUCE, COPY_IN)])
def test_without_its_wait_memory_is_reused_too_early(what: str, kind: str) -> None:
    """The host frees memory that a stream still uses. Without the wait, another stream reuses the memory too early."""
    of, wrong = trace(), 0
    plan = step_plan(of, with_policy(of, Depth(2)), Options(one_communicator=False)).plan
    for index, step in enumerate(plan.steps):
        if step.kind == kind and step.after:
            changed = replace(step, after=())
            report = verify([[replace(plan, steps=(*plan.steps[:index], changed, *plan.steps[index + 1 :]))]])
            wrong += "data race" in problems(report)
    assert wrong, f"no {kind} races without its wait for the {what}"


def test_gathers_that_do_not_wait_for_the_optimizer_race_with_it() -> None:
    of = trace()
    issued = issue_order(of)
    without = [issue for issue in issued if issue.what != WAIT_OPTIMIZER]
    report = proven(of, without, Options(rounds=2))
    assert problems(report) == {"data race"}
    assert "optimizer" in str(report)
    for event in (False, True):
        assert proven(of, issued, Options(rounds=2, event=event, other=3)).ok


def test_ranks_that_gather_in_different_orders_wait_for_ever() -> None:
    of = trace()
    plans = [step_plan(of, prefetch) for prefetch in (with_policy(of, Depth(2)), Prefetch(((2, 1),)))]
    assert all(verify([[plan.for_rank(rank, 2) for rank in range(2)]]).ok for plan in plans)
    report = verify([[plans[0].for_rank(0, 2), plans[1].for_rank(1, 2)]])
    assert "deadlock" in problems(report)
    assert "gather" in str(report)


def test_two_gathered_outputs_are_alive_by_default_and_one_more_for_each_layer_ahead() -> None:
    of = trace((1,) * 6)
    slots = []
    for depth in (None, 1, 2, 3):
        prefetch = DEFAULT if depth is None else with_policy(of, Depth(depth))
        calls = issue_order(of, prefetch)
        forward = calls[: calls.index(Issue(GATHER, 5), calls.index(Issue(FORWARD, 5, 1)))]
        slots.append(StepPlan(of, forward, Options()).plan.extents["gathered"])
    assert slots == [2, 2, 3, 4]


def test_peak_bytes_counts_what_is_gathered_and_what_is_unsharded() -> None:
    layers = [Layer("a", nbytes=100), Layer("b", nbytes=10), Layer("c", nbytes=1)]
    of = layers_in_a_row(layers, (1, 1, 1))
    # All of a is alive twice, gathered and unsharded. The layers b and c add to it if they are gathered ahead.
    assert peak_bytes(layers, issue_order(of, with_policy(of, Depth(0)))) == 200
    assert peak_bytes(layers, issue_order(of, with_policy(of, Depth(1)))) == 210
    assert peak_bytes(layers, issue_order(of, with_policy(of, Depth(2)))) == 211


@pytest.mark.parametrize(("compute", "gather"), [(5.0, 1.0), (5.0, 5.0), (1.0, 5.0)])
@pytest.mark.parametrize("depth", [None, 1, 2, 4])
def test_the_overlap_bound(compute: float, gather: float, depth: int | None) -> None:
    """If a layer computes for longer than its gather takes, only the first gather, the gather at the start of the
    backward and the last reduce-scatter are exposed."""
    n = 8
    of = trace((compute,) * n, gather)
    prefetch = DEFAULT if depth is None else with_policy(of, Depth(depth))
    time = predict(of, prefetch).step - of.optimizer
    computed = n * compute + 2 * n * compute
    if gather <= compute:
        # The last layer is gathered again for its backward, and nothing is left to compute meanwhile.
        assert time <= (computed + 3 * gather) * 1.05
        forward = layers_in_a_row(of.layers, (compute,) * n)
        assert predict(forward, prefetch).step <= (gather + n * compute) * 1.05
    else:
        assert time <= (3 * n * gather + 3 * compute) * 1.05, "the communicator must never be idle for long"
    alone = with_policy(of, Depth(0))
    assert predict(of, alone).step - of.optimizer > time, "without prefetching, the step must be longer"


def test_a_large_layer_hides_the_gathers_of_several_small_ones() -> None:
    """Uneven layers need explicit prefetch: torch's own looks two gathers ahead, even if there is time for more."""
    of = trace((8, 1, 1, 1, 1), (1, 2, 2, 2, 2))
    forward = layers_in_a_row(of.layers, (8, 1, 1, 1, 1))
    assert predict(forward, DEFAULT).exposed == 1 + 1, "the first gather and half of the last one must be exposed"
    assert predict(forward, with_policy(forward, Depth(4))).exposed == 1
    found = search(forward)
    assert predict(forward, found).exposed == 1
    assert not any(search(forward, cap=2).forward), "with two gathered outputs at a time, nothing may be prefetched"


def test_the_search_keeps_to_its_cap_and_is_never_slower_than_the_default() -> None:
    source = random.Random(0)
    for _ in range(12):
        n = source.randint(2, 7)
        forward = tuple(source.choice((1.0, 2.0, 8.0)) for _ in range(n))
        order = tuple(source.randrange(n) for _ in range(n + 2)) if source.random() < 0.5 else ()
        of = trace(forward, tuple(source.choice((1.0, 3.0)) for _ in range(n)), order)
        default = predict(of, DEFAULT)
        best = predict(of, search(of))
        for depth in range(4):
            assert best.step <= predict(of, with_policy(of, Depth(depth))).step + 1e-6
        for cap in (default.memory, default.memory + 1):
            found = predict(of, search(of, cap))
            assert found.memory <= cap
            assert best.step - 1e-6 <= found.step <= default.step + 1e-6
        with pytest.warns(UserWarning, match=r"within 0 bytes: the one that needs least is used, with \d+ bytes"):
            least = predict(of, search(of, 0)).memory
        assert least <= min(predict(of, with_policy(of, Depth(depth))).memory for depth in range(4))


def test_a_budget_of_bytes_is_what_each_layer_gathers_ahead_at_most() -> None:
    layers = [Layer(str(index), nbytes=nbytes) for index, nbytes in enumerate((5, 3, 3, 9, 1))]
    of = layers_in_a_row(layers, (1,) * 5, (1,) * 5)
    found = with_policy(of, Bytes(6))
    assert found.forward == ((1, 2), (2,), (), (4,), ())
    assert found.backward == ((0,), (0,), (1,), (2, 1), (4,)), "a layer that names itself must gather nothing ahead"


def test_the_event_lets_gathers_start_while_other_work_is_done() -> None:
    of = trace((2,) * 4, 2)
    times = [predict(of, DEFAULT, Options(rounds=2, event=event, other=3)).step for event in (False, True)]
    assert times[0] - times[1] == 2, "the event must hide the first gather of the second step"


def test_the_plan_is_drawn_like_every_other() -> None:
    made = step_plan(trace(), with_policy(trace(), Depth(2)))
    timeline = simulate([[made.plan]], made.costs)
    picture = draw.svg(timeline)
    assert "gather" in picture
    assert "reduce-scatter" in picture
    starts = {(event.at.step.kind, event.at.step.chunk): event.start for event in timeline.events}
    assert starts[GATHER, (3, 0)] == 3, "a collective must be drawn from its start, not from when its stream is idle"
    assert {"gather", "compute", "reduce"} == {event["args"]["name"] for event in threads(draw.trace(timeline))}
    assert "gather" in draw.text([[made.plan]])


def threads(trace: dict[str, list[dict[str, object]]]) -> list[dict[str, dict[str, str]]]:
    return [event for event in trace["traceEvents"] if event.get("name") == "thread_name"]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"forward": (1.0,)}, "2 layers with 1 forward and 0 backward times"),
        ({"forward": (1.0, -1.0)}, "a time is -1.0"),
        ({"forward": (1.0, float("nan"))}, "a time is nan"),
        ({"forward": (1.0, 1.0), "order": (0, 2)}, "name layers 0 to 1"),
    ],
)
def test_a_step_that_cannot_be_is_refused(arguments: dict[str, tuple[float, ...]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layers_in_a_row([Layer("a"), Layer("b")], **arguments)  # type: ignore[arg-type]


def test_an_event_is_used_once() -> None:
    """If a step has two forwards, as when gradients are accumulated, the second waits for the compute stream."""
    of = replace(layers_in_a_row(trace().layers, (2,) * 4), optimizer=1.0)
    made = StepPlan(of, issue_order(of) * 2, Options(rounds=2, event=True, other=3))
    times = {(e.at.step.kind, e.at.step.chunk): e for e in simulate([[made.plan]], made.costs).events}
    first, second = (times[GATHER, (0, turn)] for turn in (2, 3))
    assert first.start == times["optimizer", (0, 0)].end
    assert second.start >= times[FORWARD, (3, 2)].end
