"""Calls in CUDA graphs must not disturb each other or calls that the host issues. Barriers separate them, but only if
the host cannot know which call comes before.

The tests delay some ranks. A peer that does not wait for them would overwrite data that they have not read yet.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import symm_overlap
from symm_overlap import _C
from symm_overlap.plan import Step
from symm_overlap.runtime import state_of
from symm_overlap.runtime.cuda.workspace import CudaWorkspace
from symm_overlap.settings import Transform, transformed
from tests.gpu.conditions import around_steps
from tests.gpu.conftest import WAITS, Worlds
from tests.gpu.test_capture import agree, integers
from tests.ranks import Rank

pytestmark = pytest.mark.gpu

Op = Callable[[Tensor], Tensor]

ROWS, COLUMNS = 12, 8  # world sizes 2 and 3 divide the rows
BEHIND = 3_000_000  # cycles by which a rank reads its peers' data late
CALLS_OF_GRAPHS = (1, 2, 3)
EVENTS = 14


def late_to_read(rank: int) -> Transform:
    """Return a transform that lets the stream of ``rank`` sleep before every step that reads peers' data."""

    @contextmanager
    def behind(step: Step) -> Iterator[None]:
        if any(region.rank != rank for region in step.reads):
            torch.cuda._sleep(BEHIND)
        yield

    return around_steps(behind)


def op_of(me: Rank, kind: str) -> tuple[Op, Callable[[list[Tensor]], Tensor]]:
    """Return an op on this rank's input, and a function that computes its result from the inputs of all ranks."""
    B = integers(COLUMNS, COLUMNS, seed=3, dtype=torch.float32)
    weight = B.to(me.device)

    def gather(A: Tensor) -> Tensor:
        with symm_overlap.force_path("fused" if kind == "fused gather" else "pipelined", chunks=1, streams=1):
            return symm_overlap.all_gather_matmul(A, [weight], 0, me.group, return_A=False)[1][0]

    def scatter(A: Tensor) -> Tensor:
        with symm_overlap.force_path("sequential"):
            return symm_overlap.matmul_reduce_scatter(A, weight, "sum", 0, me.group)

    def reduce(A: Tensor) -> Tensor:
        with symm_overlap.force_path("sequential"):
            return symm_overlap.matmul_all_reduce(A, weight, "sum", me.group)

    if "gather" in kind:
        return gather, lambda every: torch.cat(every) @ B
    if kind == "reduce":
        return reduce, lambda every: torch.stack(every).sum(0) @ B
    return scatter, lambda every: (torch.stack(every).sum(0) @ B).chunk(me.world)[me.rank]


def in_any_order(me: Rank, kind: str, late: int, seed: int) -> None:
    """The host enqueues graphs of one to three calls each, and calls between them, without ever waiting."""
    op, expected = op_of(me, kind)
    chance = random.Random(seed)  # the same on every rank
    lane = symm_overlap.lane(70)

    def numbers(event: int, call: int) -> list[Tensor]:
        seeds = (1000 * rank + 10 * event + call for rank in range(me.world))
        return [integers(ROWS, COLUMNS, seed=each, dtype=torch.float32) for each in seeds]

    inputs = [torch.zeros(ROWS, COLUMNS, device=me.device) for _ in CALLS_OF_GRAPHS]
    if kind == "gather in place":
        inputs = [symm_overlap.empty(ROWS, COLUMNS, group=me.group, device=me.device) for _ in CALLS_OF_GRAPHS]
    with lane, transformed(*([late_to_read(me.rank)] if me.rank == late else [])):
        op(inputs[0])
        torch.cuda.synchronize()
        graphs: list[tuple[torch.cuda.CUDAGraph, list[Tensor]]] = []
        for calls in CALLS_OF_GRAPHS:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = [op(each) for each in inputs[:calls]]
            graphs.append((graph, outputs))
        events = [chance.choice([None, *graphs]) for _ in range(EVENTS)]
        given = [[each[me.rank].to(me.device) for each in (numbers(e, c) for c in range(3))] for e in range(EVENTS)]
        torch.cuda.synchronize()
        found: list[list[Tensor]] = []
        for event, numbers_now in zip(events, given, strict=True):
            for target, source in zip(inputs, numbers_now, strict=True):
                target.copy_(source)
            if event is None:
                found.append([op(inputs[0])])
            else:
                event[0].replay()
                found.append([each.clone() for each in event[1]])
    torch.cuda.synchronize()
    for number, outputs in enumerate(found):
        for call, output in enumerate(outputs):
            agree(output, expected(numbers(number, call)))
    symm_overlap.raise_failures()


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("kind", ["gather", "gather in place", "scatter", "reduce"])
@pytest.mark.parametrize("world", [2, 3])
def test_nobody_overwrites_what_a_late_rank_has_yet_to_read(
    gpu_ranks: Worlds, world: int, kind: str, late: int, waits: str
) -> None:
    gpu_ranks.run(world, in_any_order, kind, late, 10 * world + late, waits=waits)


def test_nobody_overwrites_what_a_kernel_has_yet_to_read(gpu_ranks: Worlds) -> None:
    pytest.importorskip("triton")
    gpu_ranks.run(2, in_any_order, "fused gather", 1, 5)


def on_two_streams(me: Rank, kind: str, late: int) -> None:
    """The calls of a graph are issued on two streams in turn, which no event orders. One rank's side stream is late."""
    op, expected = op_of(me, kind)
    every = [
        [integers(ROWS, COLUMNS, seed=9 * call + r, dtype=torch.float32) for r in range(me.world)] for call in range(4)
    ]
    inputs = [each[me.rank].to(me.device) for each in every]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with symm_overlap.lane(75):
        op(inputs[0])
        torch.cuda._sleep(1)  # loads its code, which a capture does not
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            outputs = []
            for call, x in enumerate(inputs):
                with torch.cuda.stream(side if call % 2 == 0 else main):
                    if call % 2 == 0 and me.rank == late:
                        torch.cuda._sleep(BEHIND)
                    outputs.append(op(x))
            main.wait_stream(side)
    for _ in range(4):
        graph.replay()
        for output, numbers in zip(outputs, every, strict=True):
            agree(output, expected(numbers))
            output.fill_(float("nan"))
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("kind", ["gather", "reduce", "fused gather"])
def test_calls_of_a_lane_run_one_after_another_in_a_graph_whatever_stream_they_are_captured_on(
    gpu_ranks: Worlds, kind: str, late: int
) -> None:
    if kind == "fused gather":
        pytest.importorskip("triton")
    gpu_ranks.run(2, on_two_streams, kind, late)


def with_captures_of_its_own(me: Rank) -> None:
    """Rank 0 captures a call and discards the graph. The ranks stay in step."""
    op, expected = op_of(me, "gather")
    every = [integers(ROWS, COLUMNS, seed=rank, dtype=torch.float32) for rank in range(me.world)]
    A = every[me.rank].to(me.device)
    with symm_overlap.lane(73):
        op(A)
        torch.cuda.synchronize()
        if me.rank == 0:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                op(A)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [op(A), op(A)]
    for _ in range(2):
        graph.replay()
        for output in outputs:
            agree(output, expected(every))
            output.fill_(float("nan"))
    with symm_overlap.lane(73):
        agree(op(A), expected(every))
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


def test_a_capture_that_one_rank_has_thrown_away_changes_nothing(gpu_ranks: Worlds) -> None:
    gpu_ranks.run(2, with_captures_of_its_own)


def grows_behind_replays(me: Rank) -> None:
    """Replays are running on one stream while a call on another stream grows the workspace. The host waits for them."""
    x, graph = torch.ones(ROWS, COLUMNS, device=me.device), torch.cuda.CUDAGraph()
    large = torch.ones(1 << 20, device=me.device)
    with symm_overlap.lane(74), symm_overlap.force_path("sequential"):
        symm_overlap.all_reduce(x, "sum", me.group)
        with torch.cuda.graph(graph):
            total = symm_overlap.all_reduce(x, "sum", me.group)
        for _ in range(3):
            torch.cuda._sleep(BEHIND * me.rank)
            graph.replay()
        with torch.cuda.stream(torch.cuda.Stream()), symm_overlap.prepare():
            symm_overlap.all_reduce(torch.empty(1 << 20, device=me.device), "sum", me.group)
        found = symm_overlap.all_reduce(large, "sum", me.group)
        graph.replay()
    for each in (total, found):
        agree(each, torch.full(each.shape, float(me.world)))
    symm_overlap.raise_failures()


def test_a_lane_grows_while_replays_are_under_way(gpu_ranks: Worlds) -> None:
    gpu_ranks.run(2, grows_behind_replays)


def nodes_of(graph: torch.cuda.CUDAGraph) -> int:
    """Return the number of nodes of a graph that was captured with ``keep_graph``."""
    count = ctypes.c_size_t()
    runtime = ctypes.CDLL(None)
    assert runtime.cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)) == 0
    return count.value


def nodes_by_calls(me: Rank, most: int) -> list[int]:
    """Return the numbers of nodes of graphs with 0, 1, 2, ... sums without a matmul. Each is a copy and a kernel."""
    x = torch.ones(ROWS, COLUMNS, device=me.device)
    counts = []
    with symm_overlap.lane(71):
        symm_overlap.all_reduce(x, "sum", me.group)
        for calls in range(most + 1):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                x.add_(0)  # torch warns of an empty graph
                for _ in range(calls):
                    symm_overlap.all_reduce(x, "sum", me.group)
            counts.append(nodes_of(graph))
    return counts


def test_only_the_first_call_of_a_graph_has_a_barrier(gpu_ranks: Worlds) -> None:
    barrier, copy, kernel = 1, 1, 1
    for counts in gpu_ranks.run(2, nodes_by_calls, 4):
        added = [more - fewer for fewer, more in pairwise(counts)]
        assert added == [barrier + copy + kernel, *[copy + kernel] * 3]


def barriers_met(me: Rank) -> list[int]:
    """Return the number of barriers that the ranks of a lane have passed, after each of several events."""
    x, graph = torch.ones(ROWS, COLUMNS, device=me.device), torch.cuda.CUDAGraph()

    def call() -> None:
        symm_overlap.all_reduce(x, "sum", me.group)

    def met() -> int:
        workspace = state_of(me.group).lane(me.group, me.device, 72).workspace
        assert isinstance(workspace, CudaWorkspace)
        signals, channels = workspace._signals, workspace.channels + 1
        assert signals is not None
        words = _C.CudaLane.control_words(me.world, channels)
        control = signals._handle.get_buffer(me.rank, (words,), torch.int32)
        awaited = control[-me.world * channels :].view(me.world, channels)  # see csrc/common/control_block.h
        return int(awaited[1 - me.rank, -1])

    with symm_overlap.lane(72):
        counts = []
        call()
        with torch.cuda.graph(graph):
            call()
            call()
        for event in (call, graph.replay, call, call, graph.replay, graph.replay, call):
            event()
            counts.append(met())
    return counts


def test_a_call_of_the_host_meets_the_peers_only_behind_a_replay(gpu_ranks: Worlds) -> None:
    assert gpu_ranks.run(2, barriers_met) == [[0, 1, 2, 2, 3, 4, 5]] * 2
