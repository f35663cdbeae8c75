"""Matmuls that span the parts of several peers, between processes on GPUs: calls back to back, and in a graph.

Inputs are small integers, whose sums every dtype here represents exactly, so outputs are compared bit by bit.
"""

from __future__ import annotations

import pytest
import torch

import symm_overlap
from tests.gpu.conftest import WAITS, Worlds
from tests.gpu.test_collectives import agree, all_shards, integers
from tests.ranks import Rank

pytestmark = pytest.mark.gpu

ROWS, K, N = 48, 128, 128  # parts are multiples of 256 bytes


def products(me: Rank, A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gathered = symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False)[1][0]
    summed = symm_overlap.matmul_all_reduce(A, B, "sum", me.group)
    return gathered, summed, symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group)


def agree_with(me: Rank, found: tuple[torch.Tensor, ...], shards: list[torch.Tensor], B: torch.Tensor) -> None:
    whole = [(shard.float() @ B.cpu().float()) for shard in shards]
    total = sum(whole[1:], whole[0])
    agree(found[0].float(), torch.cat(whole))
    agree(found[1].float(), total)
    agree(found[2].float(), total.chunk(me.world)[me.rank])


def back_to_back(me: Rank, calls: int, dtype: torch.dtype) -> None:
    """Inputs are overwritten at once, and outputs are checked only at the end."""
    A, B = torch.empty(ROWS, K, device=me.device, dtype=dtype), integers(K, N, seed=1, dtype=dtype).to(me.device)
    inputs = [all_shards(me.world, ROWS, K, call=call, dtype=dtype) for call in range(calls)]
    uploaded = [shards[me.rank].to(me.device) for shards in inputs]
    found = []
    for call in range(calls):
        with symm_overlap.lane(60), symm_overlap.force_path("pipelined", span=2 + call % 2, streams=2):
            A.copy_(uploaded[call])
            found.append(products(me, A, B))
            A.fill_(float("nan"))
    for each, shards in zip(found, inputs, strict=True):
        agree_with(me, each, shards, B)
    symm_overlap.raise_failures()


@pytest.mark.gpu(cpu_too=True)
@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("world", [3, 4])
def test_calls_back_to_back(gpu_ranks: Worlds, world: int, waits: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gpu_ranks.run(world, back_to_back, 12, dtype, waits=waits)


def replayed(me: Rank, rounds: int) -> None:
    """A graph knows dependencies, and not the order in which steps were issued."""
    A, B = torch.zeros(ROWS, K, device=me.device), integers(K, N, seed=1, dtype=torch.float32).to(me.device)
    with symm_overlap.lane(61), symm_overlap.force_path("pipelined", span=3, streams=2):
        products(me, A, B)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = products(me, A, B)
        for number in range(rounds):
            shards = all_shards(me.world, ROWS, K, call=number, dtype=torch.float32)
            A.copy_(shards[me.rank])
            graph.replay()
            agree_with(me, captured, shards, B)
            agree_with(me, products(me, A, B), shards, B)
    symm_overlap.raise_failures()


@pytest.mark.parametrize("waits", WAITS)
def test_replays_of_a_graph(gpu_ranks: Worlds, waits: str) -> None:
    gpu_ranks.run(4, replayed, 4, waits=waits)
