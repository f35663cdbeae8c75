"""`prepare` on the path "fused" creates the lane's flags, and compiles and loads the kernels that its calls launch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor

import symm_overlap
from bench.harness.triton_gpu import Driver, gpu, keys
from symm_overlap.collective import scaled
from symm_overlap.collective.exchange.fused.flagged import _flags
from symm_overlap.kernels.flags import FEWEST, Flags
from symm_overlap.runtime import NotPreparedError, state_of
from symm_overlap.runtime.cpu.backend import CpuBackend
from symm_overlap.runtime.cpu.workspace import CpuWorkspace
from tests.collective import reference as ref
from tests.collective.test_fake_group import CALLS, forms
from tests.collective.test_fused import FUSED, fused
from tests.collective.test_prepare import nothing_is_made
from tests.ranks import Pool, Rank
from tests.transforms import comparing, recorded

ops = torch.ops.symm_overlap
LOW = torch.bfloat16


def flags_on(me: Rank, lane: int) -> Flags:
    return _flags[state_of(me.group).lane(me.group, me.device, lane)][False]


# --- values


def calls(me: Rank, A: Tensor, whole: Tensor, B: Tensor, Bt: Tensor, bias: Tensor) -> list[Tensor]:
    gathered, products = ops.fused_all_gather_matmul(A, [B, Bt], 1, me.group_name)
    part = ops.fused_matmul_reduce_scatter(whole, B, "sum", 0, me.group_name)
    total = ops.fused_matmul_all_reduce(A, Bt, "sum", me.group_name, bias)
    return [gathered, *products, part, total, ops.all_gather(A, 0, me.group_name)]


def values(me: Rank, lane: int) -> None:
    def inputs(number: int) -> tuple[Tensor, ...]:
        B, Bt = ref.binary((6, 5), LOW, seed=8), ref.binary((7, 6), LOW, seed=9).t()
        A, whole = (ref.binary((rows, 9, 6), LOW, seed=me.rank + number) for rows in (2, 2 * me.world))
        return A, whole, B, Bt, torch.arange(7.0).to(LOW)

    given = [inputs(number) for number in range(2)]
    with symm_overlap.force_path("sequential"):
        expected = [calls(me, *each) for each in given]
    with comparing(False), symm_overlap.lane(lane), fused(2):
        with symm_overlap.prepare():
            sizes = [each.shape for each in calls(me, *(torch.empty_like(each) for each in given[0]))]
            calls(me, *given[1])  # tensors from outside the block keep their values
        assert sizes == [each.shape for each in expected[0]]
        flags = flags_on(me, lane)
        assert int(flags.status.abs().sum()) == 0, "a kernel has run inside prepare()"
        words = flags.words.data_ptr()
        for each, right in zip(given, expected, strict=True):
            with nothing_is_made(me), recorded() as kinds:
                found = calls(me, *each)
            assert kinds.count("tiles") == 3
            for one, other in zip(found, right, strict=True):
                ref.same(one, other)
        assert flags_on(me, lane) is flags
        assert flags.words.data_ptr() == words
        with symm_overlap.force_path("pipelined"):  # the lane serves other paths too
            ref.same(calls(me, *given[0])[1], expected[0][1])


def test_calls_after_it_have_the_values_of_plain_ones_and_make_no_flags(
    ranks: Pool, fresh_lane: Callable[[], int]
) -> None:
    ranks.run(2, values, fresh_lane())


def more_flags(me: Rank, lane: int) -> None:
    """A later `prepare` block adds flags to a lane that has some. Calls that need fewer flags still work."""
    A, B = torch.ones(FEWEST * me.world, 3), torch.ones(3, 2)
    with comparing(False), symm_overlap.lane(lane):
        for chunks in (1, FEWEST, 1):
            with fused(chunks):
                with symm_overlap.prepare():
                    symm_overlap.matmul_all_reduce(A, B, "sum", me.group)
                    symm_overlap.matmul_all_reduce(A[:1], B, "sum", me.group)  # one chunk
                flags = flags_on(me, lane)
                assert flags.count >= me.world * chunks
                words = flags.words.data_ptr()
                found = symm_overlap.matmul_all_reduce(A, B, "sum", me.group)
                ref.same(found, torch.full((FEWEST * me.world, 2), 3.0 * me.world))
                assert flags.words.data_ptr() == words


def test_flags_are_added_to_those_of_a_lane(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, more_flags, fresh_lane())


def one_cannot_make_them(me: Rank, lane: int) -> None:
    failing = mock.patch.object(Flags, "prepare", side_effect=RuntimeError("out of memory") if me.rank else None)
    with comparing(False), symm_overlap.lane(lane), fused():
        with failing, pytest.raises(RuntimeError, match="out of memory") if me.rank else nullcontext():
            with symm_overlap.prepare():
                FUSED["all_gather_matmul"](me.group_name)
            assert me.rank == 0
        found, _ = symm_overlap.all_gather_matmul(torch.ones(4, 6), [torch.ones(6, 5)], 0, me.group)
        assert torch.equal(found, torch.ones(8, 6))


def test_a_rank_that_cannot_make_its_own_part_raises_and_its_lane_is_in_step(
    ranks: Pool, fresh_lane: Callable[[], int]
) -> None:
    ranks.run(2, one_cannot_make_them, fresh_lane())


def while_a_graph_is_captured(me: Rank, lane: int) -> None:
    """Test what the host decides: the workspace pretends that a graph is being captured."""
    refused = NotPreparedError("with symm_overlap.prepare():")
    with comparing(False), symm_overlap.lane(lane):
        with symm_overlap.force_path("pipelined"):
            FUSED["matmul_all_reduce"](me.group_name)  # the lane now has a workspace but no flags
        with fused():
            with mock.patch.object(CpuWorkspace, "require_preparable", side_effect=refused) as asked:
                with pytest.raises(NotPreparedError, match=re.escape("prepare(): matmul_all_reduce((10, 6), (6, 5)")):
                    FUSED["matmul_all_reduce"](me.group_name)
                assert "2 flags" in asked.call_args.args[0]
            with symm_overlap.prepare():
                FUSED["matmul_all_reduce"](me.group_name)
            with mock.patch.object(CpuWorkspace, "require_preparable", side_effect=refused) as asked:
                FUSED["matmul_all_reduce"](me.group_name)
                A, B = torch.ones(FEWEST * me.world, 3), torch.ones(3, 2)
                with fused(FEWEST), pytest.raises(NotPreparedError):
                    symm_overlap.matmul_all_reduce(A, B, "sum", me.group)
                assert f"{FEWEST * me.world} flags" in asked.call_args.args[0]


def test_flags_that_cannot_be_made_in_a_capture_are_told_with_the_call_to_prepare(
    ranks: Pool, fresh_lane: Callable[[], int]
) -> None:
    """If a captured call needs new flags, the error names the call to put into `prepare`."""
    ranks.run(2, while_a_graph_is_captured, fresh_lane())


# --- kernels


def of_a_model(me: Rank) -> None:
    """Call the ops as a model might.

    Some tiles are loaded with tensor descriptors and others with pointers, inputs start at various offsets in their
    memory, and some inputs are float8.
    """
    name, rows = me.group_name, 256
    for dtype, k, n in ((LOW, 128, 256), (LOW, 72, 40), (torch.float32, 64, 64), (torch.float16, 1, 1)):
        for first in (0, 1, 16):
            A = torch.empty(rows + first, k, dtype=dtype)[first:].requires_grad_()
            B, Bt = torch.empty(k, n, dtype=dtype), torch.empty(2 * n, k, dtype=dtype)[n:].t()
            bias = torch.empty(n + first, dtype=dtype)[first:]
            _, products = symm_overlap.all_gather_matmul(A, [B, Bt, B[:, : n // 2]], 0, name, return_A=first == 0)
            products[0].sum().backward()
            for some in (rows - 3, 5):  # with 5 rows, one chunk is empty
                symm_overlap.matmul_all_reduce(A.detach()[:some], Bt, "sum", name, bias)
            symm_overlap.matmul_reduce_scatter(A, B, "avg", 0, name).sum().backward()
    for per_row in (False, True):
        A = torch.empty(rows, 128, dtype=torch.float8_e4m3fn)
        Bs = [torch.empty(n, 128, dtype=torch.float8_e4m3fn).t() for n in (256, 128)]
        scale = torch.ones((rows, 1) if per_row else ())
        scales = [torch.ones((1, B.shape[1]) if per_row else ()) for B in Bs]
        biases = [torch.ones(B.shape[1], dtype=LOW) for B in Bs]
        symm_overlap.all_gather_scaled_matmul(A, Bs, scale, scales, 0, name, biases=biases)
        rest = {"bias": biases[0] if per_row else None, "use_fast_accum": per_row, "out_dtype": LOW}
        symm_overlap.scaled_matmul_reduce_scatter(A, Bs[0], scale, scales[0], "sum", 0, name, **rest)


def every_op(me: Rank) -> None:
    for call in CALLS.values():
        forms(call, me.group_name, me.world, "fused")


def refuse_another(me: Rank, driver: Driver) -> None:
    """While a graph is captured, a call that needs a kernel that is not loaded is rejected before it begins."""
    refused = NotPreparedError("with symm_overlap.prepare():")
    expected = re.escape("prepare(): matmul_all_reduce((8, 48), (48, 16)")
    capturing = mock.patch.object(CpuWorkspace, "capturing", return_value=True)
    with capturing, mock.patch.object(CpuWorkspace, "require_preparable", side_effect=refused) as asked:
        every_op(me)
        driver.launched.clear()
        counted = state_of(me.group).calls[0]
        for _ in range(2):
            with pytest.raises(NotPreparedError, match=expected):
                symm_overlap.matmul_all_reduce(torch.empty(8, 48), torch.empty(48, 16), "sum", me.group)
            assert "a kernel that is not loaded" in asked.call_args.args[0]
            assert driver.launched == []
            assert state_of(me.group).calls[0] == counted, "it would differ from the count of ranks without a capture"
    symm_overlap.matmul_all_reduce(torch.empty(8, 48), torch.empty(48, 16), "sum", me.group)
    assert "matmul_reduce_scatter_kernel" in driver.launched


def on_a_gpu(me: Rank, architecture: int) -> dict[str, int]:
    """Return for each kernel how many variants `prepare` loads. Calls on a simulated GPU then launch all of them."""
    machine = mock.patch.object(CpuBackend, "machine", return_value=(architecture, 132))
    multiplies = mock.patch.object(scaled, "scaled_mm")  # a CPU may reject shapes that a GPU accepts
    with gpu(architecture) as driver, machine, multiplies, comparing(False), symm_overlap.force_path("fused", chunks=2):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Accessing the data pointer")  # as tensors here have no data
            with symm_overlap.prepare(), symm_overlap.timeout(1):
                every_op(me)
                of_a_model(me)
        prepared, loaded = keys(architecture), list(driver.loaded)
        assert driver.launched == []
        every_op(me)
        of_a_model(me)
        assert keys(architecture) == prepared
        assert driver.loaded == loaded
        assert set(driver.launched) == set(loaded)
        refuse_another(me, driver)
    return {name: len(found) for name, found in prepared.items()}


def test_calls_after_it_launch_kernels_that_are_compiled_and_loaded(fresh_ranks: Callable[..., Pool]) -> None:
    """The test uses fresh ranks, because in the shared ranks kernels may be set up for Triton's interpreter."""
    found, other = fresh_ranks(2).run(2, on_a_gpu, 90)
    assert found == other
    assert min(found[f"{name}_kernel"] for name in ("all_gather_matmul", "matmul_reduce_scatter")) > 15
