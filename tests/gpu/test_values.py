"""Every op on every path, forward and backward: exact on 0/1 inputs, and otherwise as accurate as the plain form.

The cases are those of `tests.collective.gradient_cases`. The expected values come from plain PyTorch in float64, on the
inputs of all ranks at once, on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from symm_overlap.runtime.cuda.memory_operations import stream_waits
from tests.collective import reference as ref
from tests.collective.gradient_cases import CASES, Case, Inputs
from tests.gpu.conditions import PATHS, Path, on_path
from tests.gpu.conftest import Worlds
from tests.ranks import Rank

pytestmark = pytest.mark.gpu(cpu_too=True)

KINDS = sorted({type(case).__name__ for case in CASES})
FUSED = {"Gather", "Scatter"}
FEW_PATHS: list[Path] = [("sequential", None, None), ("pipelined", 2, 2), ("fused", 2, None), ("c10d", 2, None)]
LARGEST_WHOLE = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}
"""The largest number up to which a dtype represents every integer exactly."""


def cases_of(kind: str) -> list[Case]:
    return [case for case in CASES if type(case).__name__ == kind]


def zeros_and_ones(shape: tuple[int, ...], dtype: torch.dtype, seed: int, largest: int = 8) -> Tensor:
    """Return random zeros and ones. With more products in a sum there are fewer ones, so that sums stay exact.

    Args:
        largest: the largest number of products in any sum on one rank.
    """
    ones = min(0.5, (8 / largest) ** 0.5)
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < ones).to(dtype)


def everyone(
    case: Case, world: int, make: Callable[[tuple[int, ...], int], Tensor], device: torch.device
) -> list[Inputs]:
    """Return the inputs of all ranks. Every rank can create all of them."""
    return [
        [make(shape, 100 * rank + index).to(device) for index, shape in enumerate(case.shapes(rank, world))]
        for rank in range(world)
    ]


def plain(case: Case, inputs: list[Inputs], weights: list[Inputs], dtype: torch.dtype, rank: int) -> Inputs:
    """Return the outputs of a rank and the gradients of its inputs, computed by plain PyTorch in a dtype.

    Args:
        weights: for every rank, the factors of its outputs' elements in the sum over all ranks that is differentiated.
    """
    leaves = [[each.to(dtype).requires_grad_() for each in of_rank] for of_rank in inputs]
    outputs = case.plain(leaves)
    flat = [output for of_rank in outputs for output in of_rank]
    grads = torch.autograd.grad(flat, leaves[rank], [each.to(dtype) for of_rank in weights for each in of_rank])
    return [*(each.detach() for each in outputs[rank]), *grads]


def ours(case: Case, inputs: Inputs, weights: Inputs, path: Path, me: Rank) -> Inputs:
    """Return the same outputs and gradients, computed by the op."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    with on_path(path):
        outputs = case.run(leaves, me)
    return [*(each.detach() for each in outputs), *torch.autograd.grad(outputs, leaves, weights)]


def weights_like(case: Case, inputs: list[Inputs], make: Callable[[tuple[int, ...], int], Tensor]) -> list[Inputs]:
    """Return weights for every output of every rank."""
    outputs = case.plain([[each.double() for each in of_rank] for of_rank in inputs])
    return [
        [make(tuple(each.shape), 5000 + 100 * rank + index).to(each.device) for index, each in enumerate(of_rank)]
        for rank, of_rank in enumerate(outputs)
    ]


def difference(found: Tensor, expected: Tensor) -> str:
    """Describe the first difference and count all, or return an empty string if there is none."""
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    wrong = (found.double() != expected).nonzero()
    if not len(wrong):
        return ""
    at = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {found.numel()} elements, first at {at}: {found[at]}, expected {expected[at]}"


def exact(me: Rank, cases: Iterable[Case], path: Path, dtypes: list[torch.dtype], largest: int = 8) -> None:
    """Check all cases, even after a wrong value, so that ranks stay in step. Report all problems at the end."""
    problems = []
    for case in cases:
        for dtype in dtypes:

            def make(shape: tuple[int, ...], seed: int, dtype: torch.dtype = dtype) -> Tensor:
                return zeros_and_ones(shape, dtype, seed, largest)

            inputs = everyone(case, me.world, make, me.device)
            weights = weights_like(case, inputs, make)
            expected = plain(case, inputs, weights, torch.float64, me.rank)
            most = max((float(each.max()) for each in expected if each.numel()), default=0.0)
            assert most * me.world <= LARGEST_WHOLE[dtype], f"{case}: sums up to {most} are not exact in {dtype}"
            found = ours(case, inputs[me.rank], weights[me.rank], path, me)
            for index, (one, wanted) in enumerate(zip(found, expected, strict=True)):
                if text := difference(one, wanted):
                    problems.append(f"{case}, {dtype}, result {index}: {text}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_zeros_and_ones_are_exact_on_two_ranks(gpu_ranks: Worlds, path: Path, kind: str) -> None:
    if path[0] == "fused" and kind not in FUSED:
        pytest.skip("as pipelined: there is no kernel for it")
    gpu_ranks.run(2, exact, cases_of(kind), path, [torch.bfloat16])


@pytest.mark.parametrize("path", FEW_PATHS, ids=str)
def test_zeros_and_ones_are_exact_on_four_ranks(gpu_ranks: Worlds, path: Path) -> None:
    gpu_ranks.run(4, exact, CASES, path, [torch.bfloat16])


def test_zeros_and_ones_are_exact_on_one_rank(gpu_ranks: Worlds) -> None:
    gpu_ranks.run(1, exact, CASES, PATHS[0], [torch.bfloat16, torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("path", [("pipelined", 2, 2), ("fused", 1, None), ("c10d", 1, None)], ids=str)
def test_other_dtypes_are_exact(gpu_ranks: Worlds, path: Path, dtype: torch.dtype) -> None:
    gpu_ranks.run(2, exact, CASES, path, [dtype])


@pytest.mark.parametrize("path", FEW_PATHS, ids=str)
def test_waits_of_streams_by_memory_operations(gpu_ranks: Worlds, path: Path) -> None:
    for world in (2, 4):
        gpu_ranks.run(world, exact, CASES, path, [torch.bfloat16], waits="memory")


def shares_one_queue(me: Rank) -> None:
    """In a shared queue, a wait by a memory operation would block every stream, so kernels must wait."""
    if me.device.type == "cuda":
        assert not stream_waits(me.device)
    exact(me, CASES, ("pipelined", 2, 2), [torch.bfloat16])


def test_kernels_wait_in_streams_that_share_one_hardware_queue(gpu_ranks: Worlds) -> None:
    """Kernels wait even if memory operations are requested. The steps of a plan are in an order in which a single
    stream could run them all.
    """
    gpu_ranks.run(2, shares_one_queue, waits="memory", CUDA_DEVICE_MAX_CONNECTIONS="1")


ALLOWED = 2.0
"""The allowed error, as a multiple of the plain form's error. Matmuls of chunks may sum in another order than the whole
matmul, and a sum of two parts that are each rounded to the dtype has 1.5 times the error of a sum rounded once."""


def rounded(me: Rank, kind: str, path: Path) -> None:
    """Check on random numbers that errors against float64 are like those of the plain form."""
    problems = []
    for case in (each.sized((2, 40), 192, 48) for each in cases_of(kind)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):

            def make(shape: tuple[int, ...], seed: int, dtype: torch.dtype = dtype) -> Tensor:
                return ref.normal(shape, dtype, seed)

            inputs = everyone(case, me.world, make, me.device)
            weights = weights_like(case, inputs, make)
            true = plain(case, inputs, weights, torch.float64, me.rank)
            common = plain(case, inputs, weights, dtype, me.rank)
            found = ours(case, inputs[me.rank], weights[me.rank], path, me)
            for index, (one, usual, wanted) in enumerate(zip(found, common, true, strict=True)):
                error, bound = ref.relative_error(one, wanted), ALLOWED * ref.relative_error(usual, wanted)
                if not error <= bound:
                    problems.append(f"{case}, {dtype}, result {index}: error {error:.2e}, allowed {bound:.2e}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", FEW_PATHS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_are_as_near_as_the_plain_form(gpu_ranks: Worlds, kind: str, path: Path) -> None:
    if path[0] == "fused" and kind not in FUSED:
        pytest.skip("as pipelined: there is no kernel for it")
    gpu_ranks.run(2, rounded, kind, path)
