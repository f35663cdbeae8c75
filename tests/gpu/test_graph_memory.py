"""What graphs use stays, what nobody uses goes without harm to a capture, and a capture that fails breaks no lane."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext, suppress

import pytest
import torch

import symm_overlap
from symm_overlap.fsdp.communication.collectives import all_gather
from symm_overlap.fsdp.communication.slots import Slots
from symm_overlap.runtime import state_of
from symm_overlap.runtime.lane import CaptureFailedError
from symm_overlap.settings import current
from tests.gpu.conftest import WAITS, Worlds
from tests.gpu.test_collectives import agree
from tests.ranks import Rank

pytestmark = pytest.mark.gpu

SIZE = 64


def product(me: Rank, x: torch.Tensor, path: str = "pipelined") -> torch.Tensor:
    with symm_overlap.force_path(path, chunks=2):
        return symm_overlap.matmul_all_reduce(x, x, "sum", me.group)


def expected(me: Rank, number: float) -> torch.Tensor:
    """Return the product if ``x`` is full of this number on all ranks."""
    return torch.full((SIZE, SIZE), float(number**2 * SIZE * me.world))


def gets_more_channels(me: Rank) -> None:
    """The lane gets more channels after each of three captures. All graphs, and calls of the host, go on."""
    x = torch.ones(SIZE, SIZE, device=me.device)
    graphs = []
    with symm_overlap.lane(80):
        lane = state_of(me.group).lane(me.group, me.device, 80)
        for channels in (12, 16, 20):
            product(me, x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                graphs.append((graph, product(me, x)))
            lane.reserve(1, 30.0, 7, channels=channels)
        for number in range(4):
            x.fill_(number)
            for graph, output in graphs:
                output.zero_()
                graph.replay()
                agree(output, expected(me, number))
            agree(product(me, x), expected(me, number))
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


@pytest.mark.parametrize("waits", WAITS)
def test_graphs_outlive_the_channels_that_they_were_captured_with(gpu_ranks: Worlds, waits: str) -> None:
    gpu_ranks.run(2, gets_more_channels, waits=waits)


def lets_go_of_a_lane(me: Rank, where: str) -> None:
    x = torch.ones(SIZE, device=me.device)
    slots = [Slots("gather", me.group, me.device, 2, current())]
    slots[0].reserve(2, 4096)
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def let_go() -> None:
        slots.clear()
        gc.collect()

    with torch.cuda.graph(graph):
        found = x + 1
        if where == "thread":
            thread = threading.Thread(target=let_go)
            thread.start()
            thread.join()
        else:
            with torch.cuda.stream(other) if where == "other stream" else nullcontext():
                let_go()
        found += 1
    graph.replay()
    agree(found, torch.full((SIZE,), 3.0))
    Slots("gather", me.group, me.device, 2, current()).reserve(2, 4096)  # frees the memory of the first one


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("where", ["captured stream", "other stream", "thread"])
def test_a_lane_may_go_away_during_a_capture(gpu_ranks: Worlds, where: str, waits: str) -> None:
    gpu_ranks.run(2, lets_go_of_a_lane, where, waits=waits)


def captures_in_vain(me: Rank, path: str) -> None:
    """On rank 0, something makes a capture invalid, before a call or after it. Then all ranks go on."""
    x = torch.ones(SIZE, SIZE, device=me.device)

    def capture(calls_before: int) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            for _ in range(calls_before):
                product(me, x, path)
            with suppress(RuntimeError):
                torch.cuda.synchronize()
            with pytest.raises(CaptureFailedError):
                product(me, x, path)

    with symm_overlap.lane(81):
        product(me, x, path)
        torch.cuda.synchronize()
        for calls_before in (0, 1, 2):
            if me.rank == 0:
                with pytest.raises(RuntimeError, match="CUDA"):
                    capture(calls_before)
            agree(product(me, x, path), expected(me, 1))
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


@pytest.mark.parametrize("path", ["sequential", "pipelined"])
def test_a_capture_that_fails_leaves_the_lane_usable(gpu_ranks: Worlds, path: str) -> None:
    gpu_ranks.run(2, captures_in_vain, path)


def gathers_in_a_capture(me: Rank) -> None:
    slots = Slots("gather", me.group, me.device, 2, current())

    def gather(value: float) -> None:
        output = slots.allocate((me.world * SIZE,), torch.float32)
        all_gather(slots, output, output.chunk(me.world)[me.rank].fill_(value + me.rank))
        agree(output, torch.arange(float(me.world)).add(value).repeat_interleave(SIZE))

    for number in range(2):  # also before the first call
        if me.rank == 0:
            with pytest.raises(RuntimeError, match="slots cannot be used"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                gather(-1.0)
        gather(float(number))


def test_slots_refuse_to_be_captured(gpu_ranks: Worlds) -> None:
    gpu_ranks.run(2, gathers_in_a_capture)
