"""The matmul inside the ops is right for every layout. It is torch's own matmul if oneDNN would not be faster."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import symm_overlap
from symm_overlap import _C
from symm_overlap.collective.ops.product import product
from symm_overlap.runtime import backend_of
from tests.ranks import Pool, Rank

CPU = backend_of("cpu")

M, N, K = 128, 96, 112  # more than 2**20 products


def can_prefer_onednn() -> bool:
    _C.prefer_onednn(True)
    try:
        return _C.onednn_is_quicker()
    finally:
        _C.prefer_onednn(None)


needs_onednn = pytest.mark.skipif(not can_prefer_onednn(), reason="this torch has no oneDNN, or it refuses this CPU")


@pytest.fixture
def onednn() -> Iterator[None]:
    """Prefer oneDNN, as on a CPU on which MKL is slow."""
    _C.prefer_onednn(True)
    yield
    _C.prefer_onednn(None)


@pytest.fixture(params=[pytest.param(True, marks=needs_onednn, id="oneDNN"), pytest.param(False, id="torch")])
def library(request: pytest.FixtureRequest) -> Iterator[None]:
    _C.prefer_onednn(request.param)
    yield
    _C.prefer_onednn(None)


LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda m, n: torch.empty(m, n),
    "columns": lambda m, n: torch.empty(n, m).t(),
    "rows of a wider matrix": lambda m, n: torch.empty(m, n + 5)[:, 2:-3],
    "columns of a taller matrix": lambda m, n: torch.empty(n, m + 5)[:, 2:-3].t(),
    "every other column": lambda m, n: torch.empty(m, 2 * n)[:, ::2],
    "one column expanded": lambda m, n: torch.empty(m, 1).expand(m, n),
}


def filled(layout: str, m: int, n: int, seed: int) -> Tensor:
    matrix = LAYOUTS[layout](m, n)
    (matrix[:, :1] if layout == "one column expanded" else matrix).copy_(
        torch.randint(-3, 4, (m, 1 if layout == "one column expanded" else n), generator=torch.manual_seed(seed))
    )
    return matrix


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("a_layout", LAYOUTS)
def test_every_layout_gives_the_exact_product_of_integers(a_layout: str, b_layout: str, add: bool) -> None:
    a, b = filled(a_layout, M, K, 0), filled(b_layout, K, N, 1)
    expected = a.double() @ b.double()
    for out_layout in ("rows", "columns", "rows of a wider matrix", "every other column"):
        out = filled(out_layout, M, N, 2) if add else LAYOUTS[out_layout](M, N).fill_(float("nan"))
        start = out.double() if add else 0
        CPU.multiply(a, b, out, add=add)
        assert torch.equal(out.double(), expected + start), out_layout


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("layout", ["rows of a wider matrix", "every other column"])
def test_what_lies_between_the_rows_of_the_output_stays(layout: str) -> None:
    """A matmul into a strided output does not change the memory between the output's elements."""
    whole = torch.full((M, 2 * N + 10), 7.0)
    out = whole[:, 5 : 5 + N] if layout == "rows of a wider matrix" else whole[:, 0 : 2 * N : 2]
    CPU.multiply(torch.ones(M, K), torch.ones(K, N), out)
    assert (out == K).all()
    out.fill_(7)
    assert (whole == 7).all()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("shape", [(0, 4, 4), (4, 0, 4), (4, 4, 0), (64, 2048, 0), (1, 2048, 2048), (2048, 1, 2048)])
def test_empty_and_thin_matrices(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    out = torch.full((m, n), float("nan"))
    CPU.multiply(torch.ones(m, k), torch.ones(k, n), out)
    assert (out == k).all()
    CPU.multiply(torch.ones(m, k), torch.ones(k, n), out, add=True)
    assert (out == 2 * k).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_multiplied_by_torch(dtype: torch.dtype) -> None:
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    out = torch.empty(M, N, dtype=dtype)
    CPU.multiply(a, b, out)
    assert torch.equal(out, a @ b)
    assert CPU.calls_torch(dtype)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_product_in_another_dtype_is_rounded_to_that_of_its_factors_first(device: str) -> None:
    """A product with another output dtype is first rounded to the dtype of its factors."""
    multiply = backend_of(device).multiply  # the one for GPUs only calls torch, so it runs here
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    out, same = torch.ones(M, N), torch.ones(M, N).bfloat16()
    for add in (True, False):
        expected = (a @ b).float() + (out if add else 0)
        assert not torch.equal(expected, a.float() @ b.float() + (out if add else 0))
        multiply(a, b, out, add=add)
        assert torch.equal(out, expected)
        expected = torch.addmm(same, a, b) if add else a @ b
        multiply(a, b, same, add=add)
        assert torch.equal(same, expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4, 3\] @ \[4, 5\] does not give \[4, 5\]"):
        _C.multiply(torch.ones(4, 3), torch.ones(4, 5), torch.ones(4, 5), False)


@needs_onednn
@pytest.mark.usefixtures("onednn")
def test_the_error_is_that_of_a_float32_matmul() -> None:
    """The matmul has full precision. With TF32 or bfloat16 inside, its error would be over 100 times as large."""
    torch.manual_seed(0)
    k = 4096
    a, b = torch.randn(M, k), torch.randn(k, N)
    out = torch.empty(M, N)
    CPU.multiply(a, b, out)
    exact = a.double() @ b.double()
    assert not torch.equal(out, a @ b), "torch.mm was called, so this test checks nothing"
    rounding = torch.finfo(torch.float32).eps / 2
    assert (out - exact).norm() / exact.norm() <= rounding * k**0.5  # the RMS error of adding the products one by one


@needs_onednn
@pytest.mark.usefixtures("onednn")
def test_repeated_calls_give_the_same_bits() -> None:
    a, b = torch.randn(M, K), torch.randn(K, N)
    first = torch.empty(M, N)
    CPU.multiply(a, b, first)
    for _ in range(20):
        again = torch.empty(M, N)
        CPU.multiply(a.clone(), b.clone(), again)
        assert torch.equal(first, again)


@needs_onednn
@pytest.mark.usefixtures("onednn")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_torchs_switch_turns_onednn_off() -> None:
    a, b = torch.randn(M, 4096), torch.randn(4096, N)
    out = torch.empty(M, N)
    with torch.backends.mkldnn.flags(enabled=False):
        assert CPU.calls_torch(torch.float32)
        CPU.multiply(a, b, out)
    assert torch.equal(out, a @ b)
    assert not CPU.calls_torch(torch.float32)


def libraries(a: Tensor, b: Tensor, out: Tensor) -> set[str]:
    """Return the names of the profiler's events of one matmul."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        CPU.multiply(a, b, out)
    return {event.key for event in profile.key_averages()}


@needs_onednn
@pytest.mark.usefixtures("onednn")
def test_a_product_has_the_gradients_of_torchs_and_theirs() -> None:
    a, b, grad = (torch.randint(-3, 4, shape).float() for shape in ((M, K), (K, N), (M, N)))

    def gradients(multiply_them: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        inputs = [one.clone().requires_grad_() for one in (a, b)]
        result = multiply_them(*inputs)
        first = torch.autograd.grad(result, inputs, grad, create_graph=True)
        second = torch.autograd.grad(first[0].sum() + 2 * first[1].sum(), inputs, allow_unused=True)
        return [result, *first, *(one for one in second if one is not None)]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = gradients(product)
    assert sum(event.key == "symm_overlap::onednn_matmul" for event in profile.events()) >= 3
    for ours, torchs in zip(found, gradients(torch.matmul), strict=True):
        assert torch.equal(ours, torchs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_opcheck_is_green(layout: str, dtype: torch.dtype) -> None:
    a, b = (filled(layout, *shape, 0).to(dtype).requires_grad_() for shape in ((5, 3), (3, 4)))
    torch.library.opcheck(torch.ops.symm_overlap._product.default, (a, b))


def matmuls_of_gradients(me: Rank) -> list[list[str]]:
    """Return the events of matmuls in the backward pass of each op. They show which library computed the matmuls."""
    A, B = torch.ones(128, 128, requires_grad=True), torch.ones(128, 128, requires_grad=True)
    found = []
    for output in (
        symm_overlap.all_gather_matmul(A, [B], 0, me.group)[1][0],
        symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False, save="shard")[1][0],
        symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group),
        symm_overlap.matmul_all_reduce(A, B, "sum", me.group),
    ):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            output.backward(torch.ones_like(output))
        names = ("aten::mm", "aten::addmm_", "aten::matmul", "symm_overlap::onednn_matmul")
        found.append(sorted({event.key for event in profile.events() if event.key in names}))
    return found


def gradients_with_onednn(me: Rank) -> list[list[str]]:
    _C.prefer_onednn(True)
    try:
        return matmuls_of_gradients(me)
    finally:
        _C.prefer_onednn(None)


@needs_onednn
def test_gradients_are_multiplied_by_the_same_library(ranks: Pool) -> None:
    assert ranks.run(2, gradients_with_onednn)[0] == [["symm_overlap::onednn_matmul"]] * 4


# Each kind of CPU needs a process, as oneDNN is tested when the package is imported. torch is imported once for all.
ON_OTHER_CPUS = """
import os, sys, torch
for isa in sys.argv[1:]:
    if os.fork() == 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = isa
        from symm_overlap import _C
        _C.prefer_onednn(True)
        a, out = torch.ones(128, 128), torch.empty(128, 128)
        _C.multiply(a, a, out, False)
        assert (out == 128).all()
        print(_C.onednn_is_quicker(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.slow
@needs_onednn
@pytest.mark.skipif(platform.machine() != "x86_64", reason="ONEDNN_MAX_CPU_ISA has other values")
def test_where_onednn_refuses_torch_multiplies() -> None:
    """mkldnn_matmul needs AVX-512 and raises an error if it may not use it."""
    command = [sys.executable, "-c", ON_OTHER_CPUS, "AVX2", "DEFAULT"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["False", "True"]


@needs_onednn
@pytest.mark.usefixtures("onednn")
def test_a_profile_shows_which_library_was_called() -> None:
    a, b, out = torch.ones(M, K), torch.ones(K, N), torch.empty(M, N)
    assert libraries(a, b, out) == {"symm_overlap::onednn_matmul"}
    assert "aten::mm" in libraries(torch.ones(7, 512), torch.ones(512, 512), torch.empty(7, 512)), "few rows"
    assert "aten::mm" in libraries(a[:64], b, out[:64]), "little to do"
    assert "aten::mm" in libraries(torch.ones(512, 512), torch.ones(512, 7), torch.empty(512, 7)), "few columns"
    assert libraries(torch.ones(K, M).t(), torch.ones(N, K).t(), torch.empty(M, 2 * N)[:, :N]) == {
        "symm_overlap::onednn_matmul"
    }


@needs_onednn
@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("rows", "columns")])
def test_what_onednn_would_first_copy_is_multiplied_by_torch(layout: str) -> None:
    a, b, out = torch.ones(M, K), torch.ones(K, N), torch.empty(M, N)
    assert "aten::mm" in libraries(filled(layout, M, K, 0), b, out)
    assert "aten::mm" in libraries(a, filled(layout, K, N, 0), out)
    assert "aten::mm" in libraries(a, b, torch.empty(N, M).t())
