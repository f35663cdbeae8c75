"""CudaStreams with fake streams that only record calls: what it enqueues, in which order, and after which events."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from symm_overlap import _C
from symm_overlap.collective.planners import all_gather_consume, produce_all_reduce, produce_reduce_scatter
from symm_overlap.plan import Plan, execute
from symm_overlap.plan.verify import verify
from symm_overlap.runtime.cuda.streams import CudaStreams

PLANNERS = [all_gather_consume, produce_reduce_scatter, produce_all_reduce]


class Device:
    """A fake GPU that runs nothing. ``log`` lists (stream, what) in the order in which work was enqueued."""

    def __init__(self) -> None:
        self.log: list[tuple[str, object]] = []
        self.made: list[tuple[int, bool]] = []
        self.caller = self.current = Stream(self, "caller")

    def new_stream(self, index: int, high_priority: bool) -> int:
        self.made.append((index, high_priority))
        return len(self.made)

    def set_stream(self, stream) -> None:
        self.current = stream


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_event(self, event) -> None:
        self.device.log.append((self.name, event.record_of))

    def wait_stream(self, other) -> None:
        self.device.log.append((self.name, ("all of", other.name)))


class Event:
    def record(self, stream) -> None:
        self.record_of = ("after", len(stream.device.log))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.current)
    monkeypatch.setattr(torch.cuda, "set_stream", device.set_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, _: Stream(device, f"side {number}"))
    monkeypatch.setattr(_C, "new_cuda_stream", device.new_stream, raising=False)
    return device


def table(device: Device):
    def note(step) -> None:
        device.log.append((device.current.name, step))

    return dict.fromkeys(("publish", "pull", "produce", "consume", "reduce", "signal", "wait", "sleep"), note)


def plan_of(planner, **arguments) -> Plan:
    return planner(1, 4, chunks=2, compute=("compute0", "compute1"), copy="copy", **arguments)


@pytest.mark.parametrize("planner", PLANNERS)
def test_steps_are_enqueued_in_the_plans_order_each_on_its_stream(planner, device: Device) -> None:
    plan, streams = plan_of(planner), CudaStreams(torch.device("cuda", 3))
    for _ in range(2):  # streams are created once
        device.log.clear()
        execute(plan, table(device), streams)
        steps = [entry for entry in device.log if hasattr(entry[1], "kind")]
        assert [step for _, step in steps] == list(plan.steps[1:-1])
        names = {step.stream: name for name, step in steps}
        assert all(names[step.stream] == name for name, step in steps)
        assert names["compute0"] == "caller"
        assert len(set(names.values())) == len(plan.streams) == 3
        assert device.current is device.caller
    order = [name for name in plan.streams if name != "compute0"]
    assert device.made == [(3, name == "copy") for name in order]  # R2: copies have the higher priority


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_step_is_enqueued_behind_an_event_of_every_step_it_follows(planner, device: Device) -> None:
    plan = plan_of(planner)
    tables = table(device)
    tables["fork"] = tables["join"] = tables["pull"]
    execute(plan, tables, CudaStreams(torch.device("cuda", 0)))
    place = {id(step): at for at, (_, step) in enumerate(device.log) if hasattr(step, "kind")}
    followed = 0
    for step in plan.steps:
        at, waited = place[id(step)], set()
        while at and not hasattr(device.log[at - 1][1], "kind"):
            at -= 1
            waited.add(device.log[at])
        for earlier in step.after:
            name = device.log[place[id(step)]][0]
            assert (name, ("after", place[id(plan.steps[earlier])] + 1)) in waited, f"{step} does not wait"
            followed += 1
        assert len(waited) == len(step.after)
    assert followed > 4


def test_after_an_error_the_callers_stream_follows_what_was_enqueued(device: Device) -> None:
    plan = plan_of(all_gather_consume)
    tables = table(device)

    def fail(step) -> None:
        raise MemoryError("no room")

    tables["pull"] = fail  # on the copy stream
    with pytest.raises(MemoryError, match="no room"):
        execute(plan, tables, CudaStreams(torch.device("cuda", 0)))
    joined = {
        what[1] for name, what in device.log if name == "caller" and isinstance(what, tuple) and what[0] == "all of"
    }
    assert joined == {name for name, _ in device.log if name != "caller"} != set()
    assert device.current is device.caller


def test_the_error_of_a_step_is_the_one_that_is_raised(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that CUDA forbids during a capture makes the capture invalid, and then streams cannot be joined."""

    def invalid(stream: Stream, other: Stream) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def fail(step) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(Stream, "wait_stream", invalid)
    tables = {**table(device), "pull": fail}
    with pytest.raises(RuntimeError, match="not permitted"):
        execute(plan_of(all_gather_consume), tables, CudaStreams(torch.device("cuda", 0)))
    assert device.current is device.caller


@pytest.mark.parametrize("world", [2, 3, 5, 8])
@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_end_even_if_all_their_streams_are_one(planner, world: int) -> None:
    """A plan must not deadlock if the GPU runs all its steps one after another, in the order of issue."""
    # This happens if the first launch of a kernel waits for the running work, or if streams share a hardware queue.
    calls = []
    for _ in range(3):
        plans = [planner(rank, world, chunks=2, compute=("a", "b"), copy="copy") for rank in range(world)]
        calls.append(
            [replace(plan, steps=tuple(replace(step, stream="one", after=()) for step in plan.steps)) for plan in plans]
        )
    verify(calls).raise_for_problems()
