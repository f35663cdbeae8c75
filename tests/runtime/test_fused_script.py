"""Fused calls issued without Python: which compiled kernel and which flags a call uses, and what a failure does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import symm_overlap
from bench.harness.stand_in import StandIn, standing_in
from bench.harness.triton_gpu import beside_a_kernel
from symm_overlap.collective.exchange.fused import stream_flags
from symm_overlap.collective.exchange.fused.flagged import _flags
from symm_overlap.kernels import launchable as module
from symm_overlap.kernels.flags import ABANDONED, FEWEST, Flags
from symm_overlap.runtime.script import Script
from tests.collective.scaled_cases import rows_can_be_scaled
from tests.runtime.test_launches import ROWS, K, N


def call(me: StandIn, B: torch.Tensor, chunks: int = 1) -> tuple[int, ...]:
    """Call an op. Return the addresses that its kernel gets."""
    me.taken()
    with symm_overlap.force_path("fused", chunks=chunks):
        symm_overlap.all_gather_matmul(torch.empty(ROWS, K), [B], 0, me.group, return_A=False)
    (kernel,) = [numbers for what, _, numbers in me.taken() if what == "kernel"]
    return kernel[2:]


def flags_of(me: StandIn, captured: bool = False) -> Flags:
    return _flags[me.lane][captured]


def test_a_program_is_reused_for_tensors_with_the_same_strides_alignment_and_time_limit() -> None:
    storage = torch.empty(K * N + 1)
    given = [torch.empty(K, N), torch.empty(N, K).t(), storage[1:].view(K, N)]
    assert given[2].data_ptr() % 16
    counting = mock.patch.object(module, "launchable", wraps=module.launchable)
    with beside_a_kernel(), standing_in(0, 2, path="fused") as me, counting as asked:
        for count, B in enumerate(given, 1):
            for _ in range(4):
                assert B.data_ptr() in call(me, B)
            assert asked.call_count == 2 * count, "one program for each half of the workspace"
        call(me, given[0])
        assert asked.call_count == 2 * len(given)
        with symm_overlap.timeout(7):  # the kernel's own limit follows from it
            call(me, given[0])
        assert asked.call_count == 2 * len(given) + 1


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.ones(1, 1)


def gather_scaled(
    me: StandIn,
    dtype: torch.dtype = E4M3,
    out: torch.dtype = torch.bfloat16,
    A_scale: torch.Tensor = ONE,
    B_scale: torch.Tensor = ONE,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    fast: bool = False,
) -> None:
    symm_overlap.all_gather_scaled_matmul(
        torch.zeros(ROWS, K).to(E4M3), [torch.zeros(N, K).to(dtype).t()], A_scale, [B_scale], 0, me.group,
        biases=[bias], result_scales=[result_scale], out_dtype=out, use_fast_accum=fast, return_A=False,
    )  # fmt: skip


def scatter_scaled(me: StandIn, A: torch.dtype = E4M3, B: torch.dtype = E4M3, fast: bool = False) -> None:
    rows, weight = torch.zeros(2 * ROWS, K).to(A), torch.zeros(N, K).to(B).t()
    symm_overlap.scaled_matmul_reduce_scatter(rows, weight, ONE, ONE, "sum", 0, me.group, use_fast_accum=fast)


OTHER_KERNELS: list[tuple[Any, dict[str, Any]]] = [
    *((gather_scaled, {"out": dtype}) for dtype in (torch.float32, torch.float16, E4M3)),
    (gather_scaled, {"dtype": E5M2}),
    (gather_scaled, {"fast": True}),
    (gather_scaled, {"bias": torch.ones(N, dtype=torch.bfloat16)}),
    (gather_scaled, {"out": E4M3, "result_scale": torch.ones(1)}),
    (scatter_scaled, {"A": E5M2}),
    (scatter_scaled, {"B": E5M2}),
    (scatter_scaled, {"fast": True}),
]
if rows_can_be_scaled():
    scales = [{"A_scale": torch.ones(2 * ROWS, 1)}, {"B_scale": torch.ones(1, N)}, {"B_scale": torch.ones(N, 1).t()}]
    OTHER_KERNELS += [(gather_scaled, each) for each in scales]


@pytest.mark.parametrize("op", [gather_scaled, scatter_scaled])
def test_a_program_is_not_reused_for_calls_that_need_another_kernel(op: Any) -> None:
    """The shapes of all calls are equal. A kernel for other dtypes or scales would compute other numbers."""
    options = [{}, *(more for each, more in OTHER_KERNELS if each is op)]
    counting = mock.patch.object(module, "launchable", wraps=module.launchable)
    with beside_a_kernel(), standing_in(0, 2, path="fused", chunks=1) as me, counting as asked:
        for count, more in enumerate(options, 1):
            for _ in range(2):
                op(me, **more)
            assert asked.call_count == 2 * count, f"{more}: one program for each half of the workspace"
        for more in options:
            op(me, **more)
        assert asked.call_count == 2 * len(options)


def test_a_program_uses_the_flags_that_the_lane_has_now() -> None:
    B = torch.empty(K, N)
    with beside_a_kernel(), standing_in(0, 2, path="fused") as me:
        for _ in range(2):
            found = call(me, B)
            assert flags_of(me).words.data_ptr() in found
        before = flags_of(me).words
        call(me, B, chunks=FEWEST)  # allocates more flags
        words = flags_of(me).words
        assert words.data_ptr() != before.data_ptr()
        for _ in range(2):
            assert words.data_ptr() in call(me, B)
        assert flags_of(me, captured=True).count == flags_of(me).count, "a capture cannot allocate them"


def test_captured_calls_have_flags_of_their_own() -> None:
    B = torch.empty(K, N)
    counting = mock.patch.object(module, "launchable", wraps=module.launchable)
    with beside_a_kernel(), standing_in(0, 2, path="fused") as me, counting as asked:
        call(me, B)
        call(me, B)
        made = asked.call_count
        ours, theirs = (flags_of(me, captured).words.data_ptr() for captured in (False, True))
        with mock.patch.object(me.workspace, "capturing", return_value=True):
            found = call(me, B)
        assert asked.call_count == made + 1, "a program raises one set of flags"
        assert theirs in found
        assert ours not in found
        assert ours in call(me, B)


def test_a_call_that_fails_ends_the_waits_of_its_kernel() -> None:
    B = torch.empty(K, N)
    with beside_a_kernel(), standing_in(0, 2, path="fused") as me:
        call(me, B)
        assert flags_of(me).status[0] == 0
        failing = mock.patch.object(Script, "run", side_effect=RuntimeError("no memory"))
        with failing, pytest.raises(RuntimeError, match="no memory"):
            call(me, B)
        assert flags_of(me).status[0] == ABANDONED


def test_the_first_error_is_raised_if_cuda_cannot_end_the_waits() -> None:
    B = torch.empty(K, N)
    with beside_a_kernel(), standing_in(0, 2, path="fused") as me:
        call(me, B)
        failing = mock.patch.object(Script, "run", side_effect=RuntimeError("the first error"))
        broken = mock.patch.object(stream_flags, "backend_of", side_effect=RuntimeError("CUDA has failed"))
        with failing, broken as asked, pytest.raises(RuntimeError, match="the first error"):
            call(me, B)
        assert asked.called
