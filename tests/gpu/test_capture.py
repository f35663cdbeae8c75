"""Prepared calls allocate nothing and do not let the host wait, in eager calls, backward, and CUDA graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import symm_overlap
from symm_overlap._torch import symm_mem
from symm_overlap.runtime import NotPreparedError, state_of
from tests.gpu.conftest import Worlds
from tests.gpu.test_collectives import agree, all_shards, integers
from tests.ranks import Rank

pytestmark = pytest.mark.gpu

ROWS, COLUMNS, WIDTH = 64, 32, 16


@pytest.fixture(scope="module")
def triton() -> None:
    pytest.importorskip("triton")


@contextmanager
def nothing_is_made() -> Iterator[None]:
    """Inside, fail if symmetric memory is allocated, if a Triton kernel is loaded, or if the host waits for the GPU."""
    waiting, making = AssertionError("the host waits"), AssertionError("symmetric memory is allocated")

    def is_loaded(kernel: Any) -> None:
        assert kernel.module is not None, f"{kernel.name} is loaded only now"  # Triton calls this at every launch

    torch.cuda.set_sync_debug_mode("error")
    try:
        with (
            mock.patch.object(symm_mem, "empty", side_effect=making),
            mock.patch.object(torch.cuda, "synchronize", side_effect=waiting),
            mock.patch("triton.compiler.CompiledKernel._init_handles", is_loaded),
        ):
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step(me: Rank, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Run the two ops of a block: gather (world * rows, columns), multiply twice, and scatter."""
    hidden = symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False)[1][0]
    return symm_overlap.matmul_reduce_scatter(hidden, C, "sum", 0, me.group)


def step_of_all(As: list[Tensor], B: Tensor, C: Tensor, rank: int) -> Tensor:
    whole = torch.cat(As) @ B @ C
    return len(As) * whole.chunk(len(As))[rank]


def warm_up(me: Rank, B: Tensor, C: Tensor) -> None:
    """Let CUDA load the kernels and cuBLAS its libraries, on a lane that the test does not use. The kernels of the path
    "fused" are left to `prepare`.
    """
    with symm_overlap.lane(49), symm_overlap.force_path("pipelined", chunks=2, streams=2):
        A = torch.ones(ROWS, COLUMNS, device=me.device, requires_grad=True)
        step(me, A, B, C).sum().backward()
        torch.cuda.synchronize()


def weights(me: Rank) -> tuple[Tensor, Tensor]:
    B = integers(COLUMNS, WIDTH, seed=1, dtype=torch.float32).to(me.device)
    return B, integers(WIDTH, COLUMNS, seed=2, dtype=torch.float32).to(me.device)


def prepare(me: Rank) -> None:
    with symm_overlap.prepare():
        A = torch.empty(ROWS, COLUMNS, device=me.device, requires_grad=True)
        B, C = torch.empty(COLUMNS, WIDTH, device=me.device), torch.empty(WIDTH, COLUMNS, device=me.device)
        step(me, A, B, C).sum().backward()


def eager_then_captured(me: Rank, rounds: int, path: str) -> None:
    B, C = weights(me)
    with symm_overlap.force_path(path, chunks=2, streams=2):
        warm_up(me, B, C)
        with symm_overlap.lane(50):
            prepare(me)
            A = torch.zeros(ROWS, COLUMNS, device=me.device, requires_grad=True)
            with nothing_is_made():
                step(me, A, B, C).sum().backward()
        with symm_overlap.lane(51):
            prepare(me)
            A = torch.zeros(ROWS, COLUMNS, device=me.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # captures the lane's first call
                captured = step(me, A, B, C)
            for number in range(rounds):
                shards = all_shards(me.world, ROWS, COLUMNS, call=number, dtype=torch.float32)
                expected = step_of_all(shards, B.cpu(), C.cpu(), me.rank)
                A.copy_(shards[me.rank])
                for _ in range(1 + number % 3):
                    graph.replay()
                eager = [step(me, A, B, C) for _ in range(number % 2)]
                agree(captured, expected)
                for each in eager:
                    agree(each, expected)
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("path", ["pipelined", "fused"])
@pytest.mark.parametrize("world", [2, 4])
def test_what_was_prepared_is_captured_at_its_first_call_and_replayed_between_eager_calls(
    gpu_ranks: Worlds, world: int, path: str
) -> None:
    gpu_ranks.run(world, eager_then_captured, 6, path)


def loads_matmuls(me: Rank) -> None:
    """What matmuls need is loaded for the thread of backward passes too, also without gradients."""
    threads, handle = set(), torch.cuda.current_blas_handle

    def noted() -> int:
        threads.add(threading.get_ident())
        return handle()

    with mock.patch.object(torch.cuda, "current_blas_handle", noted), torch.no_grad(), symm_overlap.prepare():
        symm_overlap.all_gather(torch.empty(ROWS, COLUMNS, device=me.device), 0, me.group)
    assert len(threads) == 2
    assert threading.get_ident() in threads


def test_after_prepare_a_capture_does_not_load_the_library_of_matmuls(gpu_ranks: Worlds) -> None:
    gpu_ranks.run(2, loads_matmuls)


def not_prepared(me: Rank) -> str:
    B, C = weights(me)
    A = torch.ones(ROWS, COLUMNS, device=me.device)
    with symm_overlap.force_path("pipelined"):
        warm_up(me, B, C)
        with symm_overlap.lane(52):
            graph = torch.cuda.CUDAGraph()
            with pytest.raises(NotPreparedError) as raised, torch.cuda.graph(graph):
                step(me, A, B, C)
            step(me, A, B, C)  # works, because the ranks of the lane are still in step
    torch.cuda.synchronize()
    return str(raised.value)


def test_a_capture_that_was_not_prepared_says_what_to_prepare(gpu_ranks: Worlds) -> None:
    for message in gpu_ranks.run(2, not_prepared):
        assert "with symm_overlap.prepare(): all_gather_matmul((64, 32), (32, 16), weights=1, gather_dim=0" in message


def captured_with_gloo(me: Rank, path: str) -> str:
    """The call is rejected before it begins, and the ranks of the lane stay in step."""
    B, C = weights(me)
    A = torch.ones(ROWS, COLUMNS, device=me.device)
    with symm_overlap.force_path(path):
        warm_up(me, B, C)
        with pytest.raises(RuntimeError) as raised, torch.cuda.graph(torch.cuda.CUDAGraph()):
            symm_overlap.all_gather_matmul(A, [B], 0, me.group)
        _, (product,) = symm_overlap.all_gather_matmul(A, [B], 0, me.group)
    agree(product, A.cpu().repeat(me.world, 1) @ B.cpu())
    return str(raised.value)


@pytest.mark.parametrize("path", ["sequential", "c10d"])
def test_a_capture_refuses_the_collectives_of_gloo(gpu_ranks: Worlds, path: str) -> None:
    for message in gpu_ranks.run(2, captured_with_gloo, path):
        assert message.startswith("all_gather_matmul((64, 32), (32, 16), weights=1, gather_dim=0"), message
        assert 'force_path("pipelined")' in message


def read_in_place(me: Rank, path: str, run: Callable[[Callable[[], Tensor]], Callable[[], Tensor]]) -> None:
    B, _ = weights(me)
    whole = symm_overlap.empty(2, ROWS, COLUMNS, group=me.group, device=me.device)
    with symm_overlap.lane(53), symm_overlap.force_path(path, chunks=2, streams=2):
        for A in (whole[0], whole[1]):
            call = run(lambda A=A: symm_overlap.all_gather_matmul(A, [B], 0, me.group)[1][0])  # type: ignore[misc]
            for number in range(10):
                shards = all_shards(me.world, ROWS, COLUMNS, call=number, dtype=torch.float32)
                A.copy_(shards[me.rank])
                found = call()
                A.fill_(float("nan"))  # on the caller's stream, after the call
                agree(found, torch.cat(shards) @ B.cpu())
        state = state_of(me.group)
        lane = state.lane(me.group, me.device, 53)
        assert lane.workspace.half <= 1 << 20
        assert path != "pipelined" or all(kept.script.complete for kept in lane._kept.values() if kept.script)
        assert any(route.place[0] for route in state.routes.values()), "the place in symmetric memory is not known"
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


def eagerly(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return call


def by_replays(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()

    def replay() -> Tensor:
        graph.replay()
        return captured

    return replay


@pytest.mark.parametrize("run", [eagerly, by_replays])
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("path", ["sequential", "pipelined", "fused"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_tensor_of_symm_overlap_empty_is_read_in_place_and_never_torn(
    gpu_ranks: Worlds, world: int, path: str, run: Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
) -> None:
    gpu_ranks.run(world, read_in_place, path, run)
