"""Sums of half precision whose result is float32, or which are added in float32, between processes on GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import symm_overlap
from tests.collective import reference as ref
from tests.collective.sum_dtype_cases import CASES, FLOAT32, factors, scattered
from tests.gpu.conditions import PATHS, Path, on_path
from tests.gpu.conftest import WAITS, Worlds
from tests.ranks import Rank

pytestmark = pytest.mark.gpu(cpu_too=True)


def on_one_path(me: Rank, case: Callable[..., None], path: Path) -> None:
    with on_path(path):
        case(me, torch.bfloat16)
    symm_overlap.raise_failures()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_exact_values_on_every_path(gpu_ranks: Worlds, path: Path, case: Callable[..., None]) -> None:
    gpu_ranks.run(2, on_one_path, case, path, timeout=240)


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("world", [1, 3])
def test_exact_values_in_other_worlds(gpu_ranks: Worlds, world: int, waits: str) -> None:
    for path in (("sequential", None, None), ("pipelined", 2, 2)):
        for case in CASES:
            gpu_ranks.run(world, on_one_path, case, path, waits=waits)


def replayed(me: Rank) -> None:
    """In a graph, a call without chunks is one launch that meets the peers and sums."""
    (A,), (B,) = factors(me, torch.bfloat16, 0, 1)
    expected = scattered((A @ B).float(), "sum", 0, me)
    for number, path in enumerate((("sequential", None, None), ("pipelined", 2, 2))):

        def step() -> torch.Tensor:
            return symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group, out_dtype=FLOAT32)

        with symm_overlap.lane(70 + number), on_path(path):
            for _ in range(2):
                step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = step()
            for _ in range(3):
                found.fill_(float("nan"))
                graph.replay()
                ref.same(found, expected)
                ref.same(step(), expected)


@pytest.mark.gpu
def test_exact_values_in_a_graph(gpu_ranks: Worlds) -> None:
    gpu_ranks.run(2, replayed)
