"""Lanes may be made, and may grow, while torch's graph trees warm up, which send all allocations to a pool of a graph.

This is ``torch.compile(mode="reduce-overhead")``. After the warm-up, the trees raise an error if anything that they do
not know of is still allocated in the pool, since a replay would overwrite it.
"""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

import symm_overlap
from symm_overlap.runtime import lasting, state_of
from tests.gpu.conftest import WAITS, Worlds
from tests.gpu.test_collectives import agree
from tests.ranks import Rank

pytestmark = pytest.mark.gpu

SIZE = 64


def product(me: Rank, x: torch.Tensor, path: str, chunks: int = 2) -> torch.Tensor:
    with symm_overlap.force_path(path, chunks=chunks):
        return symm_overlap.matmul_all_reduce(x, x, "sum", me.group)


def expected(me: Rank, number: float) -> torch.Tensor:
    """Return the product if ``x`` is full of this number on all ranks."""
    return torch.full((SIZE, SIZE), float(number**2 * SIZE * me.world))


def kept_in(pool: torch.cuda.MemPool) -> list[int]:
    """Return the sizes of what is still allocated in a pool."""
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    return [block["size"] for block in blocks if block["state"] == "active_allocated"]


def test_what_lasts_is_in_no_pool_and_ordered_as_if_the_caller_had_made_it() -> None:
    device, pool = torch.device("cuda", torch.cuda.current_device()), torch.cuda.MemPool()
    mine = torch.cuda.Stream()
    with torch.cuda.use_mem_pool(pool, device), torch.cuda.stream(mine):
        torch.cuda._sleep(10_000_000)
        written = torch.full((64,), 3.0, device=device)  # in the pool, after the sleep
        made, stream = lasting(lambda: (written + 1, torch.cuda.current_stream()), device)
    assert stream == mine
    mine.synchronize()
    assert made.unique().tolist() == [4]
    assert kept_in(pool) == [512]


def test_an_error_of_what_lasts_is_raised_once_and_leaves_no_cycle() -> None:
    class Made:
        """What a failed call leaves behind."""

    def fail(left: list[weakref.ref[Made]]) -> None:
        made = Made()
        left.append(weakref.ref(made))
        raise MemoryError("no room")

    left: list[weakref.ref[Made]] = []
    gc.disable()
    try:
        with pytest.raises(MemoryError, match="no room"):
            lasting(lambda: fail(left), torch.device("cuda", torch.cuda.current_device()))
        for _ in range(100):  # the thread may still be ending
            if left[0]() is None:
                return
            time.sleep(0.05)
        raise AssertionError("the frames of the failed call are still alive")
    finally:
        gc.enable()


def makes_a_lane_in_a_pool(me: Rank, path: str, lane: int) -> None:
    x, pool = torch.ones(SIZE, SIZE, device=me.device), torch.cuda.MemPool()
    results = []
    with symm_overlap.lane(lane), torch.cuda.use_mem_pool(pool, me.device):
        results += [product(me, x, path).cpu() for _ in range(2)]  # makes the lane
        results.append(product(me, x, path, chunks=64).cpu())  # more flags, on the path that has flags
        state_of(me.group).lane(me.group, me.device, lane).reserve(3 << 20, 30.0, 7, channels=20)
        results.append(product(me, x, path).cpu())
        symmetric = symm_overlap.empty(SIZE, SIZE, group=me.group, device=me.device)
        probe = torch.ones(1, device=me.device)
    torch.cuda.synchronize()
    for result in results:
        agree(result, expected(me, 1))
    # torch allocates a workspace of cuBLAS for each stream that multiplies. Graph trees free these too.
    torch._C._cuda_clearCublasWorkspaces()
    kept = kept_in(pool)
    assert kept == [512], f"only the probe should be in the pool, but in bytes there are {kept}"
    del probe, symmetric


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize(("path", "lane"), [("sequential", 90), ("pipelined", 91), ("fused", 92)])
def test_a_lane_keeps_nothing_in_a_pool_that_is_in_use_when_it_is_made(
    gpu_ranks: Worlds, path: str, lane: int, waits: str
) -> None:
    gpu_ranks.run(2, makes_a_lane_in_a_pool, path, lane, waits=waits)


def compiles_for_trees(me: Rank, path: str, lane: int) -> None:
    """The backend "cudagraphs" uses the trees without generating code. A call of a new function warms up, the next one
    captures, and later ones replay.
    """
    torch._dynamo.reset()

    def twice(x: torch.Tensor) -> torch.Tensor:
        first = symm_overlap.matmul_all_reduce(x, x, "sum", me.group)
        return symm_overlap.matmul_all_reduce(first / first.sum(), first, "sum", me.group)

    function = torch.compile(twice, backend="cudagraphs", fullgraph=True)
    with torch.no_grad(), symm_overlap.lane(lane), symm_overlap.force_path(path, chunks=2):
        for number in (1, 2, 3, 4, 5):
            x = torch.full((SIZE, SIZE), float(number), device=me.device)
            torch.compiler.cudagraph_mark_step_begin()
            agree(function(x), torch.full((SIZE, SIZE), float(number**2 * me.world**2)))
    torch.cuda.synchronize()
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()


@pytest.mark.parametrize(("path", "lane"), [("pipelined", 94), ("fused", 95)])
def test_the_first_call_of_a_lane_may_be_a_warm_up_of_graph_trees(gpu_ranks: Worlds, path: str, lane: int) -> None:
    gpu_ranks.run(2, compiles_for_trees, path, lane, timeout=280)
