"""The script of a CUDA workspace: which streams, events and memory its program uses. Needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from symm_overlap import _C
from symm_overlap.collective.planners import all_gather_consume
from symm_overlap.plan import Plan, Region, Step, Streams
from symm_overlap.runtime import Multiply, Part, Work
from symm_overlap.runtime.cuda.streams import CudaStreams
from tests.runtime.cuda_lane import DEVICE, cuda_lane, workspace_of

ROWS, COLUMNS = 3, 2


class Driver(_C.LogDriver):  # type: ignore[misc]
    """Replaces _C.CudaDriver."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[int] = []
        self.events = 0

    def number_of(self, handle: int) -> int:
        if handle not in self.handles:
            self.handles.append(handle)
        return 1 + self.handles.index(handle)

    def reserve_events(self, count: int) -> None:
        self.events = max(self.events, count)


class Handle:
    """Replaces the handle of symmetric memory, with plain memory for four ranks."""

    rank, world_size = 1, 4

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(4, nbytes, dtype=torch.uint8)

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
        return self.memory[rank].view(dtype)[offset:][: torch.Size(shape).numel()].view(shape)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The streams that have been created: (handle, high priority)."""
    made: list[tuple[int, bool]] = []

    def new_stream(device: int, high_priority: bool) -> int:
        made.append((100 + len(made), high_priority))
        return made[-1][0]

    monkeypatch.setattr(_C, "new_cuda_stream", new_stream, raising=False)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: SimpleNamespace(cuda_stream=number))
    return made


def plan_of(chunks: int) -> Plan:
    return all_gather_consume(1, 4, chunks=chunks, compute=("compute0", "compute1"), copy="copy", outbound="compute0")


def issued(
    streams: Streams, driver: Driver, chunks: int, described: bool = True, names: bool = True
) -> list[tuple[str, int, Any]]:
    """Return the launches of one call, which gathers (chunks * ROWS, COLUMNS) and multiplies each chunk by a weight.

    Args:
        described: whether the work is described as data.
        names: whether the weight is one of the operands, which may be other tensors in the next call.
    """
    workspace = workspace_of(cuda_lane())
    workspace._memory.handle = Handle(2 * workspace.half)  # type: ignore[assignment]
    workspace._signals = SimpleNamespace(driver=driver)  # type: ignore[assignment]
    size = torch.float32.itemsize * ROWS * COLUMNS
    tensors = {
        "input": torch.ones(chunks * ROWS, COLUMNS),
        "gathered": torch.zeros(4 * chunks * ROWS, COLUMNS),
        "output": torch.zeros(4 * chunks * ROWS, COLUMNS),
    }
    weight = torch.ones(COLUMNS, COLUMNS)

    def at(region: Region) -> torch.Tensor:
        if region.buffer == "workspace":
            return workspace.view(region.rank, 0, region.start * size, (ROWS, COLUMNS), torch.float32)
        return tensors[region.buffer][region.start * ROWS : region.stop * ROWS]

    def work(step: Step) -> list[Work] | None:
        if step.kind != "consume" or not described:
            return None
        (source,), (out,) = step.reads, step.writes
        return [Multiply(Part(tensors[source.buffer], at(source)), weight, Part(tensors["output"], at(out)))]

    operands = [weight] if names else []
    script = workspace.script(plan_of(chunks), at, tensors, operands, work, streams)
    assert script.complete == (described and names)
    script.run("all_gather_matmul", [*tensors.values(), *operands], {})
    return driver.take()


def test_side_streams_are_those_of_the_lane_and_keep_their_numbers(made: list[tuple[int, bool]]) -> None:
    """All plans of a lane use the same side streams. Pulls run on the one with high priority."""
    streams, driver = CudaStreams(DEVICE), Driver()
    first = issued(streams, driver, 1)
    assert {stream for _, stream, _ in first} == {0, 1, 2}
    assert {what for what, stream, _ in first if stream == 0} >= {"copy", "signal", "multiply"}
    assert len(made) == 2
    side = {high_priority: driver.number_of(handle) for handle, high_priority in made}
    waiting = {stream for what, stream, _ in first if what == "wait"}
    assert waiting == {side[True]}, "pulls run on the stream with high priority"
    assert [what for what, stream, _ in first if stream == side[False]].count("multiply") == 2

    issued(streams, driver, 2)
    assert len(made) == 2, "side streams are created once"
    assert streams.side_streams(["copy"])["copy"].cuda_stream in driver.handles


def test_there_are_as_many_events_as_the_largest_plan_needs(made: list[tuple[int, bool]]) -> None:
    driver = Driver()
    for chunks in (2, 1):
        entries = issued(CudaStreams(DEVICE), driver, chunks)
        used = {numbers[0] for what, _, numbers in entries if what in ("record", "follow")}
        assert used == set(range(plan_of(chunks).program.events))
        assert driver.events == plan_of(2).program.events


def test_the_memory_of_every_rank_stays_where_it_is(made: list[tuple[int, bool]]) -> None:
    """The workspace recognises views of its own memory on every rank, whose addresses do not change between calls."""
    workspace = workspace_of(cuda_lane())
    workspace._memory.handle = Handle(2 * workspace.half)  # type: ignore[assignment]
    for rank in range(4):
        for parity in range(2):
            assert workspace._holds(workspace.view(rank, parity, workspace.half - 4, (1,), torch.float32))
    assert not workspace._holds(torch.zeros(1))


@pytest.mark.parametrize("without", [{"described": False}, {"names": False}])
def test_steps_whose_tensors_are_not_described_are_python_s_on_their_stream(
    made: list[tuple[int, bool]], without: dict[str, bool]
) -> None:
    """Python runs each step whose tensors are not described as data, on the stream of the step."""
    entries = issued(CudaStreams(DEVICE), Driver(), 1, **without)
    kinds = [what for what, _, _ in entries]
    assert kinds.count("enter") == 4
    assert "multiply" not in kinds
    (pulling,) = {stream for what, stream, _ in entries if what == "wait"}
    assert {stream for what, stream, _ in entries if what == "enter"} == {0, 1, 2} - {pulling}
