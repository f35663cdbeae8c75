"""Shards are multiplied as one matrix that never exists as a whole. Tested: values, exactness, and memory use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import symm_overlap
from symm_overlap import _C
from symm_overlap.runtime.cpu.sliced_matmul import multiply_shards
from tests.collective import reference as ref
from tests.ranks import Pool, Rank

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(params=[None, True], ids=["this CPU", "oneDNN where it works"])
def library(request: pytest.FixtureRequest) -> Iterator[None]:
    _C.prefer_onednn(request.param)
    yield
    _C.prefer_onednn(None)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("k", [0, 1, 40, 768, 1000, 1024])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("world", "rows"), [(1, 5), (2, 5), (3, 5), (3, 9), (3, 0)])
def test_the_products_are_those_of_the_whole(world: int, rows: int, dtype: torch.dtype, k: int) -> None:
    shards = [ref.binary((rows, k), dtype, seed=rank) for rank in range(world)]
    Bs = [ref.binary((k, n), dtype, seed=9 + n) for n in (3, 8, 0)]
    Bs += [ref.binary((n, k), dtype, seed=9 + n).t() for n in (5, 700)]
    products = [torch.full((rows * world, B.shape[1]), float("nan"), dtype=dtype) for B in Bs]
    multiply_shards(shards, Bs, [None] * len(Bs), products)
    for B, product in zip(Bs, products, strict=True):
        torch.testing.assert_close(product, torch.cat(shards) @ B, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_as_exact_as_one_matmul(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shards, B = [torch.randn(16, 2000).to(dtype) for _ in range(2)], torch.randn(2000, 32).to(dtype)
    product = torch.empty(32, 32, dtype=dtype)
    multiply_shards(shards, [B], [None], [product])
    exact = torch.cat(shards).double() @ B.double()

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    assert error(product) <= 1.2 * error(torch.cat(shards) @ B) + 1e-15


def test_blocks_of_a_linear_layers_weight_need_no_memory_and_the_quicker_library() -> None:
    _C.prefer_onednn(True)
    try:
        if not _C.onednn_is_quicker():
            pytest.skip("this torch has no oneDNN, or it refuses this CPU")
        shards, B, product = [torch.ones(16, 768)] * 2, torch.ones(1100, 768).t(), torch.empty(32, 1100)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            multiply_shards(shards, [B], [None], [product])
    finally:
        _C.prefer_onednn(None)
    assert (product == 768).all()
    events = [event.key for event in profiled.events()]
    assert events.count("symm_overlap::onednn_matmul") == 4, "expected: two blocks of columns times two shards"
    assert max(event.self_cpu_memory_usage for event in profiled.events()) < 1024


def largest_allocation(me: Rank, path: str, dim: int, dtype: torch.dtype, return_A: bool) -> float:
    """Return the largest single allocation of a call, as a fraction of the size of the gathered tensor."""
    A, rows = ref.binary((8, 48000), dtype, seed=me.rank), 48000 * (me.world if dim == 1 else 1)
    whole = torch.cat([ref.binary((8, 48000), dtype, seed=rank) for rank in range(me.world)], dim)
    B = ref.binary((rows, 4), dtype, seed=7)
    B[torch.arange(rows) % 997 != 0] = 0  # so that the sums are exact in bfloat16
    call = partial(torch.ops.symm_overlap.fused_all_gather_matmul, A, [B], dim, me.group_name, return_A=return_A)
    with symm_overlap.force_path(path):
        call()  # creates the workspace
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            _, (product,) = call()
    torch.testing.assert_close(product, whole @ B, rtol=0, atol=0)
    taken = [event.self_cpu_memory_usage for event in profiled.events()]
    return max(taken) / whole.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("path", ["sequential", "pipelined"])
def test_a_tenth_of_the_gathered_tensor_exists_at_most_unless_it_is_wanted(
    ranks: Pool, path: str, dim: int, dtype: torch.dtype
) -> None:
    """If the caller does not want the gathered tensor, no allocation reaches a tenth of its size."""
    assert max(ranks.run(3, largest_allocation, path, dim, dtype, False)) < 0.1
    assert min(ranks.run(3, largest_allocation, path, dim, dtype, True)) >= 1


@pytest.mark.parametrize(("rows", "k", "n", "matmuls"), [(128, 16, 8192, 1), (512, 64, 4096, 4)], ids=str)
def test_a_weight_with_short_columns_is_not_cut_into_tiny_blocks(rows: int, k: int, n: int, matmuls: int) -> None:
    """In half precision, sums of slices would be rounded, so there is one matmul, or one per block of 256 KiB."""
    shards, B = [torch.ones(rows, k, dtype=torch.bfloat16)] * 2, torch.ones(n, k, dtype=torch.bfloat16).t()
    product = torch.empty(2 * rows, n, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        multiply_shards(shards, [B], [None], [product])
    assert (product == k).all()
    assert sum(event.key == "aten::mm" for event in profiled.events()) == matmuls
