"""Shapes and strides: empty tensors, single elements, sizes that no tile divides, batches, views, large matmuls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import symm_overlap
from tests.collective.gradient_cases import CASES, Case, Gather, Scatter
from tests.collective.test_gathered_dtypes import all_bits_arrive
from tests.gpu.conditions import Path, on_path
from tests.gpu.conftest import Worlds
from tests.gpu.test_values import FEW_PATHS, difference, exact, zeros_and_ones
from tests.ranks import Rank

pytestmark = pytest.mark.gpu(cpu_too=True)

EMPTY = [((2, 0), 4, 5), ((0, 3), 4, 5), ((2, 3), 0, 5), ((2, 3), 4, 0), ((0, 0), 0, 0), ((1, 1), 1, 1)]


@pytest.mark.parametrize("path", FEW_PATHS, ids=str)
def test_empty_tensors_and_single_elements(gpu_ranks: Worlds, path: Path) -> None:
    cases = [case.sized(*sizes) for sizes in EMPTY for case in CASES]
    gpu_ranks.run(2, exact, cases, path, [torch.float32])


@pytest.mark.parametrize("path", ["sequential", "pipelined", "c10d"])
def test_gathers_of_other_dtypes(gpu_ranks: Worlds, path: str) -> None:
    gpu_ranks.run(2, all_bits_arrive, path)


RAGGED = [((3, 19), 33, 17), ((1, 129), 72, 40), ((2, 61), 16, 144)]


@pytest.mark.parametrize("path", [*FEW_PATHS, ("pipelined", 4, 2), ("fused", 3, None)], ids=str)
def test_sizes_that_no_tile_and_no_chunk_divides(gpu_ranks: Worlds, path: Path) -> None:
    cases = [case.sized(*sizes) for sizes in RAGGED for case in (*map(Gather, range(3)), *map(Scatter, range(3)))]
    gpu_ranks.run(2, exact, cases, path, [torch.bfloat16], 144)


def strided(tensor: Tensor, how: str) -> Tensor:
    """Return the same numbers with other strides or at another offset in memory."""
    if how == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "rows apart":  # also, no row is aligned for vector loads
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan")).to(tensor)
        wide[..., 1:-2] = tensor
        return wide[..., 1:-2]
    if how == "every other column":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan")).to(tensor)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    flat = torch.full((tensor.numel() + 1,), float("nan")).to(tensor)
    flat[1:] = tensor.flatten()
    return flat[1:].view(tensor.shape)


STRIDES = ["transposed", "rows apart", "every other column", "one element on"]


def views(me: Rank, path: Path) -> None:
    """Call ops with inputs and weights that are views of other memory."""
    problems = []
    for number, how in enumerate(STRIDES):
        other = STRIDES[number - 1]
        for dim in range(3):
            shards = [zeros_and_ones((2, 32, 64), torch.bfloat16, 10 + rank).to(me.device) for rank in range(me.world)]
            whole = torch.cat(shards, dim)
            weight = zeros_and_ones((whole.shape[2], 48), torch.bfloat16, 9, 64).to(me.device)
            product = whole.double() @ weight.double()
            with on_path(path):
                A, (found,) = symm_overlap.all_gather_matmul(
                    strided(shards[me.rank], how), [strided(weight, other)], dim, me.group
                )
                part = symm_overlap.matmul_reduce_scatter(
                    strided(whole, how), strided(weight, other), "sum", dim, me.group
                )
            wanted = (whole, product, (product * me.world).chunk(me.world, dim)[me.rank])
            for name, one, expected in zip(("A", "gather", "scatter"), (A, found, part), wanted, strict=True):
                if text := difference(one, expected.double()):
                    problems.append(f"{how}, dim {dim}, {name}: {text}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", FEW_PATHS, ids=str)
def test_inputs_that_are_views(gpu_ranks: Worlds, path: Path) -> None:
    gpu_ranks.run(2, views, path)


LARGE = {
    "gather": [Gather(1).sized((2, 2048), 4096, 3584), Gather(0).sized((4096, 1), 8192, 1280)],
    "scatter": [Scatter(1, "avg").sized((2, 2048), 1792, 4096), Scatter(0).sized((4096, 1), 1024, 8192)],
    "ragged": [Gather(1).sized((3, 1363), 2056, 1544), Scatter(1).sized((3, 1363), 1544, 2056)],
}
"""Layers of Llama 3, with 8192 gathered rows on two ranks, and ragged variants of them."""


def reduced(case: Case) -> Case:
    """Return a case that is small enough for a CPU."""
    lead, inner, columns = case.sizes
    return case.sized(tuple(-(-size // 64) for size in lead), -(-inner // 64), -(-columns // 64))


@pytest.mark.parametrize(
    "path", [("sequential", None, None), ("pipelined", 4, 2), ("fused", 1, None), ("fused", 4, None)], ids=str
)
@pytest.mark.parametrize("name", LARGE)
def test_large_matmuls(gpu_ranks: Worlds, name: str, path: Path) -> None:
    on_gpu = gpu_ranks.device == "cuda"
    cases = LARGE[name] if on_gpu else [reduced(case) for case in LARGE[name]]
    gpu_ranks.run(2, exact, cases, path, [torch.bfloat16], 8192 if on_gpu else 128)


def test_large_matmuls_on_four_ranks(gpu_ranks: Worlds) -> None:
    cases = [case for some in LARGE.values() for case in some]
    on_gpu = gpu_ranks.device == "cuda"
    cases = cases if on_gpu else [reduced(case) for case in cases]
    gpu_ranks.run(4, exact, cases, ("pipelined", 2, 2), [torch.bfloat16], 8192 if on_gpu else 128)
