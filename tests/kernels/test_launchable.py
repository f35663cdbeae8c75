"""What C++ gives to the CUDA driver to launch a kernel of Triton is what Triton's own launcher gives to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from bench.harness.triton_gpu import Driver, gpu
from symm_overlap.kernels import launchable as module
from symm_overlap.kernels import load
from symm_overlap.kernels.factor import Factor
from symm_overlap.kernels.flags import Flags
from symm_overlap.kernels.launchable import Launchable, declared_bytes, launchable
from symm_overlap.kernels.place import Machine, Place

CPU = torch.device("cpu")
OMITTED = object()
# Rows of a rank, k, n, and whether the weight is the transpose of a contiguous tensor.
SHAPES = [(512, 512, 256, False), (512, 512, 384, True), (40, 72, 24, False), (33, 1, 1, True)]

Call = Callable[[Callable[..., None]], None]


def matrix(rows: int, columns: int, dtype: torch.dtype, transposed: bool = False) -> Tensor:
    return torch.ones(columns, rows).to(dtype).t() if transposed else torch.ones(rows, columns).to(dtype)


def gather(shape: tuple[int, int, int, bool], dtype: torch.dtype, architecture: int, weights: int) -> Call:
    rows, k, n, transposed = shape
    product = lambda: matrix(2 * rows, n, torch.bfloat16 if dtype.itemsize == 1 else dtype)  # noqa: E731
    number = torch.ones(()) if dtype.itemsize == 1 else None
    each = torch.ones(n) if dtype.itemsize == 1 else None
    factors = [Factor(matrix(k, n, dtype, transposed), product(), each) for _ in range(weights)]
    at = Flags(CPU), Place(1, 2 * rows, rows, (rows + 2) // 3, 3, 2), Machine(architecture, 132)
    given = matrix(rows, k, dtype), matrix(2 * rows, k, dtype), factors
    launcher = load("all_gather_matmul", architecture).all_gather_matmul
    return lambda ahead: launcher(*given, *at, row_scale=number, ahead=ahead)


def scatter(shape: tuple[int, int, int, bool], dtype: torch.dtype, architecture: int, biased: int) -> Call:
    rows, k, n, transposed = shape
    bias = matrix(1, n, dtype)[0] if biased > 1 else None
    factor = Factor(matrix(k, n, dtype, transposed), matrix(2 * rows, n, dtype), None, bias)
    at = Flags(CPU), Place(1, 2 * rows, rows, rows, 1, 2), Machine(architecture, 132)
    launcher = load("matmul_reduce_scatter", architecture).matmul_reduce_scatter
    return lambda ahead: launcher(matrix(2 * rows, k, dtype), factor, *at, ahead=ahead)


def calls(architecture: int) -> Iterator[Call]:
    for shape in SHAPES:
        for number in (1, 3):
            yield gather(shape, torch.bfloat16, architecture, number)
            yield scatter(shape, torch.bfloat16, architecture, number)
    yield gather(SHAPES[2], torch.float32, architecture, 2)
    if architecture >= 90:
        yield gather(SHAPES[1], torch.float8_e4m3fn, architecture, 1)


def by_triton(driver: Driver, kernel: Any, *arguments: Any, **options: Any) -> list[Any]:
    """Return the arguments of the kernel after Triton's launcher has replaced descriptors, without constants."""
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    in_a_tuple = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
    name = "fill_tma_descriptor_tiled" if in_a_tuple else "fill_tma_descriptor"
    setattr(driver, name, lambda *map_arguments: ("map", *map_arguments))
    compiled = kernel.warmup(*arguments, grid=(1,), **options)
    signature, values = compiled.src.signature, dict(zip(kernel.arg_names, arguments, strict=False)) | options

    def kept(kind: Any, value: Any) -> Any:
        if isinstance(kind, tuple):
            return tuple(map(kept, kind, value))
        return OMITTED if kind == "constexpr" else value

    def flat(value: Any) -> list[Any]:
        if isinstance(value, list) or (isinstance(value, tuple) and value[:1] != ("map",)):
            return [each for item in value for each in flat(item)]
        return [] if value is OMITTED else [value]

    given = [kept(kind, values[name]) for name, kind in signature.items()]
    launcher = wrap_handle_tensordesc(lambda *final: final, signature, compiled.metadata.tensordesc_meta)
    return flat(tuple(launcher(*[OMITTED] * 13, *([tuple(given)] if in_a_tuple else given))))


def require_equal(found: Launchable, expected: list[Any]) -> int:
    """Compare parameters. Return the number of tensor maps."""
    *parameters, scratch, profile = found.parameters
    assert scratch == profile == ("number", 0)
    assert len(parameters) == len(expected)
    maps = 0
    for (name, value, *rest), theirs in zip(parameters, expected, strict=True):
        if name == "matrix":
            address, swizzle, size, kind, block, shape, strides, padding = theirs[1:]
            assert value.data_ptr() == address
            assert rest == [kind, swizzle, tuple(shape[::-1]), strides[0] * size, tuple(block[::-1])]
            assert (strides[1], padding) == (1, 0)
            maps += 1
        elif name == "address":
            assert value is theirs
        else:
            assert value == theirs
    return maps


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_parameters_are_those_of_tritons_launcher(architecture: int) -> None:
    maps = 0
    with gpu(architecture, compiling=True) as driver:
        for call in calls(architecture):

            def ahead(kernel: Any, *arguments: Any, **options: Any) -> None:
                nonlocal maps
                found = launchable(kernel, *arguments, **options)
                expected = by_triton(driver, kernel, *arguments, **options)
                small = [
                    each for each in expected if isinstance(each, tuple) and math.prod(each[6]) * each[3] < 1 << 17
                ]
                assert (found is None) == bool(small), "small matrices are left to Triton"
                if found is not None:
                    maps += require_equal(found, expected)
                    compiled = kernel.warmup(*arguments, grid=(1,), **options)
                    warps, _, shared = compiled.packed_metadata
                    assert found[:3] == (compiled.function, 32 * warps, shared)

            call(ahead)
    assert (maps > 0) == (architecture >= 90)


def test_what_is_not_as_expected_is_left_to_triton() -> None:
    found: list[Launchable | None] = []
    with gpu(80, compiling=True):
        call = scatter(SHAPES[2], torch.bfloat16, 80, 1)
        note = lambda *given, **options: found.append(launchable(*given, **options))  # noqa: E731
        call(note)
        with mock.patch.object(module, "declared_bytes", return_value=[8]):
            call(note)
        with mock.patch.object(triton.knobs.runtime, "launch_enter_hook"):
            call(note)
    assert found[0] is not None
    assert found[1:] == [None, None]


def test_declared_sizes_are_read_from_ptx() -> None:
    ptx = """.visible .entry a_kernel(
        .param .align 64 .b8 a_kernel_param_0[128], .param .u32 a_kernel_param_1,
        .param .u64 .ptr .global .align 16 a_kernel_param_2, .param .u8 a_kernel_param_3, .param .f64 a_kernel_param_4
    ) .reqntid 256 {"""
    assert declared_bytes(ptx) == [128, 4, 8, 1, 8]
