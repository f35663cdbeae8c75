"""The path "fused" on GPUs: values, several weights, float8, and CUDA graphs, whose replays advance the epochs.

Inputs are small integers. Every dtype here represents their sums exactly, so outputs are compared bit by bit.
"""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap.runtime import NotPreparedError
from tests.gpu.conftest import Worlds
from tests.gpu.test_collectives import agree, all_shards, integers
from tests.ranks import Rank

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("triton")]

WORLDS = [2, 4]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Rows of a rank, K, N, for: tiles by descriptors, tiles that are cut, fewer rows than a tile, and single elements.
SHAPES = [(256, 128, 256), (200, 256, 384), (3, 64, 48), (33, 40, 7)]


@pytest.fixture(scope="module")
def triton() -> None:
    pytest.importorskip("triton")


def values(me: Rank, dtype: torch.dtype, chunks: int) -> None:
    with symm_overlap.force_path("fused", chunks=chunks), symm_overlap.lane(40):
        for call, (m, k, n) in enumerate(SHAPES * 2):
            shards = all_shards(me.world, m, k, call=call, dtype=dtype)
            mine, bias = shards[me.rank].to(me.device), integers(n, seed=call, dtype=dtype)
            Bs = [integers(k, n, seed=call, dtype=dtype), integers(2 * n, k, seed=call + 1, dtype=dtype).t()]
            Bs += [integers(k, n, seed=call + 2, dtype=dtype)]
            on_gpu = [B.to(me.device) if B.is_contiguous() else B.t().to(me.device).t() for B in Bs]
            A, products = symm_overlap.all_gather_matmul(mine, on_gpu, 0, me.group, return_A=call % 2 == 0)
            for product, B in zip(products, Bs, strict=True):
                agree(product, torch.cat(shards) @ B)
            if A is not None:
                agree(A, torch.cat(shards))
            total = sum(shard.double() @ Bs[0].double() for shard in shards)
            reduced = symm_overlap.matmul_all_reduce(mine, on_gpu[0], "sum", me.group, bias.to(me.device))
            agree(reduced, (total + me.world * bias.double()).to(dtype))
            whole = torch.cat([mine] * me.world)
            part = symm_overlap.matmul_reduce_scatter(whole, on_gpu[0], "sum", 0, me.group)
            agree(part, total.to(dtype))
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


def calls_of_the_driver(me: Rank) -> list[int]:
    counted = ctypes.CDLL(os.environ["SYMM_OVERLAP_HOST_GPU"]).host_gpu_memory_operation_calls
    A, B = torch.ones(16, 16, device=me.device), torch.ones(16, 16, device=me.device)
    found = []
    with symm_overlap.force_path("fused", chunks=1), symm_overlap.lane(44):
        for call in (
            lambda: symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False),
            lambda: symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group),
        ):
            call()
            counted()
            call()
            found.append(counted())
    return found


@pytest.mark.skipif("SYMM_OVERLAP_HOST_GPU" not in os.environ, reason="only the host GPU counts them")
def test_memory_operations_that_follow_one_another_are_one_call_of_the_driver(gpu_ranks: Worlds) -> None:
    """The first op signals by one kernel. Then one copy stream waits for a peer, raises a flag and waits for the next
    peer, and raises a flag; the other waits for a peer and raises a flag. The second op waits for a flag, signals and
    waits for the next flag, and so on; at last it waits for three peers and one flag.
    """
    assert gpu_ranks.run(4, calls_of_the_driver, waits="memory") == [[3 + 2, 3 + 2 + 1]] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("world", WORLDS)
def test_values(gpu_ranks: Worlds, world: int, dtype: torch.dtype) -> None:
    for chunks in (1, 3):
        gpu_ranks.run(world, values, dtype, chunks)


def float8(me: Rank, per_row: bool) -> None:
    m, k, n = 208, 256, 384
    shards = all_shards(me.world, m * me.world, k, call=1, dtype=torch.float32)
    B, bias = integers(n, k, seed=5, dtype=torch.float32).t(), integers(n, seed=6, dtype=torch.float32)
    on_gpu = B.t().to(E4M3).to(me.device).t()
    scales = [torch.full((m * me.world, 1) if per_row else (), 2.0**rank) for rank in range(me.world)]
    scale = torch.full((1, n) if per_row else (), 0.5)
    mine, own = shards[me.rank].to(E4M3).to(me.device), scales[me.rank if per_row else 0].to(me.device)
    factors = [scales[rank if per_row else 0] * 0.5 for rank in range(me.world)]
    with symm_overlap.force_path("fused", chunks=2), symm_overlap.lane(41):
        _, (product,) = symm_overlap.all_gather_scaled_matmul(
            mine, [on_gpu], own, [scale.to(me.device)], 0, me.group, biases=[bias.bfloat16().to(me.device)]
        )
        exact = torch.cat([(shard @ B) * each for shard, each in zip(shards, factors, strict=True)]) + bias
        agree(product, exact.bfloat16())
        part = symm_overlap.scaled_matmul_reduce_scatter(
            mine, on_gpu, own, scale.to(me.device), "sum", 0, me.group, out_dtype=torch.bfloat16
        )
        partials = [((shard @ B) * each).bfloat16().double() for shard, each in zip(shards, factors, strict=True)]
        agree(part, sum(partials).bfloat16().chunk(me.world)[me.rank])
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


@pytest.mark.parametrize("per_row", [False, True], ids=["tensor", "rows"])
@pytest.mark.parametrize("world", WORLDS)
def test_float8(gpu_ranks: Worlds, world: int, per_row: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("torch multiplies no float8 on this GPU")
    gpu_ranks.run(world, float8, per_row)


def to_float8(me: Rank, out: torch.dtype, result_scale: float) -> None:
    """Compare a gathered product in float8 with the library's, bit by bit."""
    m, k, n = 208, 256, 384
    shards = all_shards(me.world, m, k, call=1, dtype=torch.float32)
    gathered = torch.cat(shards).to(E4M3).to(me.device)
    # GPUs give E5M2 only if a factor is E5M2.
    B = integers(n, k, seed=5, dtype=torch.float32).to(out).to(me.device).t()
    one, half, result = (torch.tensor(value, device=me.device) for value in (1.0, 0.5, result_scale))
    with symm_overlap.force_path("fused", chunks=2), symm_overlap.lane(41):
        _, (product,) = symm_overlap.all_gather_scaled_matmul(
            gathered.chunk(me.world)[me.rank],
            [B],
            one,
            [half],
            0,
            me.group,
            result_scales=[result],
            out_dtype=out,
            return_A=False,
        )
    expected = torch._scaled_mm(gathered, B, one, half, None, result, out)
    agree(product.float(), expected.float().cpu())  # shows numbers if they differ
    agree(product.view(torch.uint8), expected.view(torch.uint8).cpu())
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


@pytest.mark.parametrize("beyond", [False, True], ids=["within", "beyond"])
@pytest.mark.parametrize("out", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("world", WORLDS)
def test_products_in_float8(gpu_ranks: Worlds, world: int, out: torch.dtype, beyond: bool) -> None:
    """torch computes a product in float8 only with one scale a tensor. "beyond" exceeds the range of float8."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("torch multiplies no float8 on this GPU")
    result_scale = (2.0**6 if out is E4M3 else 2.0**12) if beyond else 2.0**-4
    gpu_ranks.run(world, to_float8, out, result_scale)


def replays(me: Rank) -> None:
    """A graph with a call of each kernel, replayed between other calls for which the lane must allocate more flags."""
    A, B = torch.zeros(64, 64, device=me.device), integers(64, 32, seed=1, dtype=torch.float32).to(me.device)

    def step() -> list[torch.Tensor]:
        product = symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False)[1][0]
        return [product, symm_overlap.matmul_all_reduce(A, B, "sum", me.group)]

    def agree_with(outputs: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        agree(outputs[0], torch.cat(shards) @ B.cpu())
        agree(outputs[1], sum(shards) @ B.cpu())

    with symm_overlap.lane(42):
        with symm_overlap.force_path("fused", chunks=2):
            for _ in range(2):
                step()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                captured = step()
        for number in range(6):
            shards = all_shards(me.world, 64, 64, call=number, dtype=torch.float32)
            A.copy_(shards[me.rank])
            for _ in range(1 + number % 3):
                graph.replay()
            agree_with(captured, shards)
            with symm_overlap.force_path("fused", chunks=2 if number < 3 else 64):
                agree_with(step(), shards)
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


@pytest.mark.parametrize("world", WORLDS)
def test_a_captured_call_can_be_replayed_between_others(gpu_ranks: Worlds, world: int) -> None:
    gpu_ranks.run(world, replays)


def captured_first(me: Rank) -> None:
    """Flags cannot be allocated in a graph, so the call is rejected, and the ranks of the lane stay in step."""
    A, B = torch.ones(64, 64, device=me.device), torch.ones(64, 32, device=me.device)
    with symm_overlap.lane(43), symm_overlap.force_path("pipelined"):
        symm_overlap.all_gather_matmul(A, [B], 0, me.group)  # allocates a workspace for the lane
        torch.cuda.synchronize()
        dist.barrier(me.group)
    with symm_overlap.lane(43), symm_overlap.force_path("fused"):
        refused = pytest.raises(NotPreparedError, match=r"with symm_overlap.prepare\(\): all_gather_matmul\(\(64, 64\)")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            symm_overlap.all_gather_matmul(A, [B], 0, me.group)
        _, (product,) = symm_overlap.all_gather_matmul(A, [B], 0, me.group)
        agree(product, torch.full((64 * me.world, 32), 64.0))


def test_a_call_that_is_captured_first_is_refused(gpu_ranks: Worlds) -> None:
    gpu_ranks.run(2, captured_first)
