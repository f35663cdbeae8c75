"""Ops under torch's settings (inference mode, autocast, compilation) and this library's, forward and backward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import symm_overlap
from symm_overlap.collective.exchange import c10d, planned
from symm_overlap.settings import Settings, current
from tests.collective import reference as ref
from tests.ranks import Pool, Rank

ops = torch.ops.symm_overlap


def inputs(me: Rank, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return ref.normal((4, 2 * me.world, 8), dtype, me.rank), ref.normal((8, 3), dtype, 9)


def every_matmul(A: torch.Tensor, B: torch.Tensor, me: Rank) -> list[torch.Tensor]:
    gathered, (product,) = symm_overlap.all_gather_matmul(A, [B], 1, me.group)
    assert gathered is not None
    return [
        gathered,
        product,
        symm_overlap.matmul_reduce_scatter(A, B, "sum", 1, me.group),
        symm_overlap.matmul_all_reduce(A, B, "sum", me.group),
    ]


def inference_mode_changes_nothing(me: Rank, lane: int, streams: int, modes: tuple[bool, bool]) -> None:
    """The lane is new, so its workspace is created in the first of the two modes."""
    A, B = inputs(me)
    results = []
    with symm_overlap.lane(lane), symm_overlap.force_path("pipelined", streams=streams):
        for mode in modes:
            with torch.inference_mode(mode):
                results.append(every_matmul(A, B, me))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("modes", [(True, False), (False, True)])
@pytest.mark.parametrize("streams", [1, 2])
def test_inference_mode_changes_nothing_on_one_or_two_streams(
    ranks: Pool, fresh_lane: Callable[[], int], streams: int, modes: tuple[bool, bool]
) -> None:
    ranks.run(2, inference_mode_changes_nothing, fresh_lane(), streams, modes)


def autocast_casts_as_for_a_matmul(me: Rank) -> None:
    A, B = inputs(me)
    for path in ("sequential", "pipelined", "c10d"):
        with symm_overlap.force_path(path):
            expected = every_matmul(A.bfloat16(), B.bfloat16(), me)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = every_matmul(A, B, me)
                mixed = every_matmul(A.bfloat16(), B, me)
        for one, also, wanted in zip(found, mixed, expected, strict=True):
            assert one.dtype == torch.bfloat16
            assert torch.equal(one, wanted)
            assert torch.equal(also, wanted)
    weight = B.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, (y,) = symm_overlap.all_gather_matmul(A, [weight], 1, me.group, return_A=False)
    y.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_autocast_casts_as_for_a_matmul_on_every_path(ranks: Pool) -> None:
    ranks.run(2, autocast_casts_as_for_a_matmul)


def backward_inside_autocast(me: Rank, compiled: bool) -> None:
    """The forward pass is not under autocast. If it is compiled, its backward pass is traced under autocast."""
    A, B = (each.requires_grad_() for each in inputs(me))
    shard = B[: 8 // me.world].detach().contiguous().requires_grad_()
    group = me.group

    def gathered(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return symm_overlap.all_gather_matmul(A, [B], 1, group)[1][0]

    def scattered(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return symm_overlap.matmul_reduce_scatter(A, B, "avg", 1, group)

    def scattered_wide(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return symm_overlap.matmul_reduce_scatter(A, B, "sum", 1, group, out_dtype=torch.float32)

    def reduced(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return symm_overlap.matmul_all_reduce(A, B, "sum", group)

    def weight(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return symm_overlap.all_gather_weight_matmul(A, B, 0, group)

    for function in (gathered, scattered, scattered_wide, reduced, weight):
        right = shard if function is weight else B
        expected = torch.autograd.grad(function(A, right).square().sum(), (A, right))

        def without(A: torch.Tensor, B: torch.Tensor, function: Callable[..., torch.Tensor] = function) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return function(A, B)

        run = torch.compile(without, fullgraph=True, backend="aot_eager") if compiled else without
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.autograd.grad(run(A, right).square().sum(), (A, right))
        for one, wanted in zip(found, expected, strict=True):
            assert torch.equal(one, wanted), function.__name__


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_have_the_dtypes_of_the_forward_pass(ranks: Pool, compiled: bool) -> None:
    ranks.run(2, backward_inside_autocast, compiled)


def blocks_inside_a_compiled_function_are_refused(me: Rank) -> None:
    A, B = inputs(me)

    def scatter() -> torch.Tensor:
        return ops.fused_matmul_reduce_scatter(A, B, "sum", 1, me.group.group_name)

    # On Python 3.10, Dynamo reads the end of the block too, and names what it cannot trace there.
    refusal = "cannot be in a compiled graph" if sys.version_info >= (3, 11) else "method `get` of class `ContextVar`"
    for block in (symm_overlap.lane, symm_overlap.timeout, lambda _: symm_overlap.force_path("sequential")):

        def function(block: Any = block) -> torch.Tensor:
            with block(1):
                return scatter()

        with pytest.raises(Exception, match=refusal):
            torch.compile(function, fullgraph=True, backend="eager")()
    compiled = torch.compile(scatter, fullgraph=True, backend="aot_eager")
    with symm_overlap.lane(1), symm_overlap.timeout(20), symm_overlap.force_path("sequential"):
        assert torch.equal(compiled(), scatter())


def test_blocks_inside_a_compiled_function_are_refused_not_forgotten(ranks: Pool) -> None:
    ranks.run(2, blocks_inside_a_compiled_function_are_refused)


def test_blocks_may_be_entered_again_and_decorate_functions() -> None:
    seconds, path = symm_overlap.timeout(5), symm_overlap.force_path("sequential")

    @path
    def inside(depth: int) -> None:
        assert current() == Settings(path="sequential", timeout=5.0)
        if depth:
            inside(depth - 1)

    for _ in range(2):
        with seconds, symm_overlap.timeout(7), seconds:
            inside(2)
            assert current() == Settings(timeout=5.0)
        with pytest.raises(ZeroDivisionError), seconds:
            assert not 1 // 0
        assert current() == Settings()


def test_a_block_decorates_no_function_that_runs_later() -> None:
    def generates() -> Iterator[int]:
        yield 0

    async def awaits() -> None:
        pass

    for function in (generates, awaits):
        with pytest.raises(TypeError, match=r"cannot decorate .*: put the block into the body"):
            symm_overlap.lane(1)(function)


def test_one_block_in_two_threads_ends_in_each_for_itself() -> None:
    block, entered = symm_overlap.lane(3), threading.Barrier(2)

    def enter() -> list[int]:
        with block:
            entered.wait(10)
            lanes = [current().lane_index]
            entered.wait(10)
        return [*lanes, current().lane_index]

    with ThreadPoolExecutor(2) as threads:
        assert [answer.result() for answer in [threads.submit(enter) for _ in range(2)]] == [[3, 0], [3, 0]]


def test_a_block_may_be_entered_while_another_thread_compiles() -> None:
    """Then `torch.compiler.is_compiling` is true here too."""
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        assert torch.compiler.is_compiling()
        with symm_overlap.lane(3):
            assert current().lane_index == 3
        with FakeTensorMode(), pytest.raises(RuntimeError, match="cannot be in a compiled graph"):
            symm_overlap.lane(3).__enter__()


def backward_has_the_settings_of_forward(me: Rank, lane: int) -> list[tuple[int, str]]:
    A, B = inputs(me)
    A.requires_grad_()
    seen: list[tuple[int, str]] = []
    original = planned.all_gather

    def watching(call: Any, *args: Any) -> None:
        seen.append((call.lane.index, call.choice.path))
        original(call, *args)

    with symm_overlap.lane(lane), symm_overlap.force_path("pipelined"):
        y = symm_overlap.matmul_reduce_scatter(A, B, "sum", 1, me.group)
    planned.all_gather = watching
    try:
        y.sum().backward()  # this gathers, after the end of the blocks
    finally:
        planned.all_gather = original
    return seen


def test_backward_has_the_lane_and_the_path_of_forward(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    lane = fresh_lane()
    assert ranks.run(2, backward_has_the_settings_of_forward, lane) == [[(lane, "pipelined")]] * 2


def a_forced_c10d_goes_through_torch_distributed(me: Rank) -> list[str]:
    A, B = inputs(me)
    seen: list[str] = []
    originals = {name: getattr(c10d, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}

    def watching(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            seen.append(name)
            originals[name](*args, **kwargs)

        return run

    for name in originals:
        setattr(c10d, name, watching(name))
    try:
        with symm_overlap.force_path("c10d", chunks=2):
            found = every_matmul(A, B, me)
    finally:
        for name, function in originals.items():
            setattr(c10d, name, function)
    for one, wanted in zip(found, every_matmul(A, B, me), strict=True):
        torch.testing.assert_close(one, wanted)
    return seen


def test_a_forced_c10d_goes_through_torch_distributed(ranks: Pool) -> None:
    assert (
        ranks.run(2, a_forced_c10d_goes_through_torch_distributed)
        == [["all_gather", "reduce_scatter", "all_reduce"]] * 2
    )


def a_sum_over_ranks_is_rounded_once(me: Rank, dtype: torch.dtype) -> None:
    shards = [ref.normal((64, 32), dtype, rank) for rank in range(me.world)]
    weight = ref.normal((32 * me.world, 16), dtype, 70)
    exact = torch.cat(shards, 1).double() @ weight.double()
    _, (y,) = symm_overlap.all_gather_matmul(shards[me.rank], [weight], 1, me.group, return_A=False)
    with symm_overlap.force_path("pipelined"):
        _, (pipelined,) = symm_overlap.all_gather_matmul(shards[me.rank], [weight], 1, me.group, return_A=False)
    whole = ref.relative_error(torch.cat(shards, 1) @ weight, exact)
    for found in (y, pipelined):
        # The parts and the sum are rounded: a factor of sqrt(2). With a rounding after each addition, it is sqrt(3).
        assert ref.relative_error(found, exact) < 1.55 * whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_summed_over_ranks_is_as_good_as_one_matmul(ranks: Pool, dtype: torch.dtype) -> None:
    ranks.run(5, a_sum_over_ranks_is_rounded_once, dtype)
