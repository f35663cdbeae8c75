"""A call may be within a step of another call: an op of tensor parallelism within a forward of a pipeline."""

from __future__ import annotations

import torch

from symm_overlap.collective.choosing.choice import Choice
from symm_overlap.collective.exchange.ranges import name_of_range
from symm_overlap.collective.problem import problem
from symm_overlap.plan import Step
from symm_overlap.plan.ranges import range_of, range_of_call
from symm_overlap.profile import exposure_of_call
from symm_overlap.profile.attribution import Launch, Range, Run, recordings


def of(name: str, start: float, end: float, thread: str = "main") -> Range:
    return Range("process", thread, start, end, name)


def ranges(device: str) -> list[Range]:
    """A forward of 100 ms in a pipeline's step, with a call of 40 ms in the middle, and a wait after the forward."""
    return [
        of(range_of_call("pipeline step", device, 1, 2), 0, 130),
        of(range_of(Step("F", "compute", chunk=(0, 0))), 10, 110),
        of(range_of_call("an op", device, 3, 4), 40, 80),
        of(range_of(Step("pull", "copy", chunk=(2, 0))), 45, 55),
        of(range_of(Step("consume", "compute0", chunk=(2, 0))), 55, 75),
        of(range_of(Step("RECV_B", "compute", peers=(0,))), 110, 125),
    ]


def test_on_a_cpu_a_step_lasts_except_for_the_calls_within_it() -> None:
    (recording,) = recordings(ranges("cpu"), [], [], {}, {}, "")
    outer, inner = recording.calls
    assert (outer.text, inner.text, outer.fact("rank"), inner.fact("world")) == ("pipeline step", "an op", 1, 4)
    spent = exposure_of_call(recording, 0)
    assert (spent.total, spent.compute, spent.copies, spent.waits) == (130, 30 + 20 + 30, 10, 15)
    assert spent.idle == 10 + 5 + 5 + 5  # before the forward, in the op outside of its steps, and after the last step
    spent = exposure_of_call(recording, 1)
    assert (spent.total, spent.compute, spent.copies, spent.idle) == (40, 20, 10, 10)


def test_on_a_gpu_an_activity_belongs_to_the_innermost_step_and_to_all_calls_around_it() -> None:
    launches = [Launch("process", "main", time, number) for number, time in enumerate((20, 50, 60, 77, 90, 120, 500))]
    runs = [
        Run("process", 0, "stream 7", 1000 + 10 * number, 1008 + 10 * number, name, number)
        for number, name in enumerate(("gemm", "Memcpy DtoD", "gemm", "end_kernel", "gemm", "a wait", "gemm"))
    ]
    (recording,) = recordings(ranges("cuda"), launches, runs, {0: "NVIDIA H100"}, {}, "")
    found = [(each.role, each.calls, each.step.kind if each.step else None) for each in recording.activities]
    assert found == [
        ("compute", (0,), "F"),
        ("copy", (1, 0), "pull"),
        ("compute", (1, 0), "consume"),
        ("compute", (1, 0), None),  # of the op, but outside of its steps
        ("compute", (0,), "F"),
        ("meet", (0,), "RECV_B"),
        ("compute", (), None),
    ]
    assert [len(each) for each in recording.activities_of_calls] == [6, 3]


def test_a_backward_pass_on_a_gpu_runs_on_a_thread_of_autograd() -> None:
    """The thread of the pipeline waits in the range of the step. An op inside has its ranges on autograd's thread."""
    everything = [
        of(range_of_call("pipeline step", "cuda", 0, 2), 0, 100),
        of(range_of(Step("B", "compute", chunk=(0, 0))), 10, 60),
        of(range_of(Step("SEND_B", "compute", chunk=(0, 0), peers=(1,))), 60, 90),
        of(range_of_call("an op", "cuda", 0, 4), 30, 40, "autograd"),
        of(range_of(Step("pull", "copy", chunk=(2, 0))), 31, 39, "autograd"),
    ]
    times = ((20, "autograd"), (35, "autograd"), (70, "loader"), (95, "loader"))
    launches = [Launch("process", thread, time, number) for number, (time, thread) in enumerate(times)]
    names = "gemm", "Memcpy PtoP", "Memcpy HtoD", "Memcpy HtoD"
    runs = [Run("process", 0, "stream 7", 200 + 10 * n, 205 + 10 * n, name, n) for n, name in enumerate(names)]
    (recording,) = recordings(everything, launches, runs, {}, {}, "")
    found = [(each.role, each.calls, each.step.kind if each.step else None) for each in recording.activities]
    assert found == [("compute", (0,), "B"), ("copy", (1, 0), "pull"), ("other", (), None), ("other", (), None)]


def test_another_thread_may_run_the_steps_of_a_stream() -> None:
    call = of(range_of_call("a call", "cpu", 0, 2), 0, 10)
    step = of(range_of(Step("consume", "compute1", chunk=(0, 0))), 2, 4, "second")
    (recording,) = recordings([call, step], [], [], {}, {}, "")
    assert [(each.role, each.stream, each.calls) for each in recording.activities] == [("compute", "compute1", (0,))]


def test_ops_on_two_threads_do_not_mix() -> None:
    """Calls on different lanes may be in flight at once, from several threads."""
    described = problem("all_gather_matmul", 64, 32, 16, torch.float32, 2, "cuda")
    name = name_of_range(described, Choice("pipelined", "planned", ""), 0)
    step = range_of(Step("consume", "compute0", chunk=(0, 0)))
    both = [
        of(text, *times, thread) for thread in ("one", "other") for text, times in ((name, (0, 20)), (step, (2, 18)))
    ]
    (recording,) = recordings(
        [*both[:2], *(each._replace(start=each.start + 1) for each in both[2:])],
        [Launch("process", "one", 10, 0), Launch("process", "other", 10, 1), Launch("process", "third", 10, 2)],
        [Run("process", 0, "stream 7", 100 + 10 * number, 105 + 10 * number, "gemm", number) for number in range(3)],
        {},
        {},
        "",
    )
    assert [each.calls for each in recording.activities] == [(0,), (1,), ()]


def test_two_calls_at_once_on_other_threads_are_not_guessed_between() -> None:
    two = [of(range_of_call("one", "cpu", 0, 2), 0, 10), of(range_of_call("other", "cpu", 0, 2), 0, 10, "second")]
    step = of(range_of(Step("consume", "compute0", chunk=(0, 0))), 2, 4, "third")
    (recording,) = recordings([*two, step], [], [], {}, {}, "")
    assert recording.activities == ()
    assert len(recording.calls) == 2
