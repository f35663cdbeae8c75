"""The fused exchange on CPU ranks: kernels in Triton's interpreter, which wait for real copies of real peers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import symm_overlap
from symm_overlap.collective.chooser import choose
from symm_overlap.collective.explain import explain
from symm_overlap.collective.ops.matmul_reduce_scatter import describe_scatter
from symm_overlap.plan import Step
from symm_overlap.settings import current
from tests.collective import reference as ref
from tests.collective.test_failures import told
from tests.kernels.interpreted import kernels
from tests.ranks import Pool, Rank
from tests.transforms import at, choices, comparing, recorded

ops = torch.ops.symm_overlap
FUSED: dict[str, Callable[[str], object]] = {
    "all_gather_matmul": lambda name: ops.fused_all_gather_matmul(ones(4, 6), [ones(6, 5)], 0, name),
    "matmul_reduce_scatter": lambda name: ops.fused_matmul_reduce_scatter(ones(12, 6), ones(6, 5), "sum", 0, name),
}


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


@contextmanager
def fused(chunks: int = 1) -> Iterator[None]:
    for op in FUSED:
        kernels(op)
    with symm_overlap.force_path("fused", chunks=chunks):
        yield


def all_gather_matmul(me: Rank, chunks: int, dtype: torch.dtype) -> None:
    Bs = [ref.binary((4, 2), dtype, seed=8), ref.binary((7, 4), dtype, seed=9).t()]
    for dim, return_A in ((0, True), (1, False), (2, True)):
        A = ref.binary((5, 3, 4), dtype, seed=me.rank)
        weights = [B.repeat(me.world, 1) for B in Bs] if dim == 2 else Bs
        expected_A, expected = ref.torch_all_gather_matmul(A, weights, dim, me)
        with fused(chunks), choices() as made:
            found_A, found = ops.fused_all_gather_matmul(A, weights, dim, me.group_name, return_A=return_A)
        assert made[-1][1].path == ("pipelined" if dim == 2 else "fused")
        for y, e in zip(found, expected, strict=True):
            ref.same(y, e)
        if return_A:
            ref.same(found_A, expected_A)


def matmul_reduce_scatter(me: Rank, chunks: int, dtype: torch.dtype) -> None:
    for dim, reduce_op in ((0, "sum"), (1, "avg"), (2, "sum")):
        shape, columns = [5, 3, 4], 6 * (me.world if dim == 2 else 1)
        if dim < 2:
            shape[dim] *= me.world
        A, B = ref.binary(shape, dtype, seed=me.rank), ref.binary((columns, 4), dtype, seed=9).t()
        scale = me.world if reduce_op == "avg" else 1  # so that the mean is a whole number, as exact as the sum
        expected = ref.torch_matmul_reduce_scatter(A, B, "sum", dim, me)
        with fused(chunks), choices() as made:
            found = ops.fused_matmul_reduce_scatter(A * scale, B, reduce_op, dim, me.group_name)
        assert made[-1][1].path == ("pipelined" if dim == 2 else "fused")
        ref.same(found, expected)


VALUES = {each.__name__: each for each in (all_gather_matmul, matmul_reduce_scatter)}


def values(me: Rank, op: str, chunks: int, dtype: torch.dtype) -> None:
    VALUES[op](me, chunks, dtype)


# `tests/kernels` has the other dtypes.
@pytest.mark.parametrize(("world", "chunks", "dtype"), [(2, 3, torch.bfloat16), (4, 1, torch.float32)])
@pytest.mark.parametrize("op", FUSED)
def test_exact_values_and_strides_of_the_reference(
    ranks: Pool, op: str, world: int, chunks: int, dtype: torch.dtype
) -> None:
    ranks.run(world, values, op, chunks, dtype)


def kernel_runs_once_while_copies_come(me: Rank) -> None:
    """Tiles of several ranks at once, weights in both layouts, an input that peers read in place; gradients too."""
    A = symm_mem.empty(19, 8, dtype=torch.float32).copy_(ref.binary((19, 8), torch.float32, seed=me.rank))
    symm_mem.rendezvous(A, me.group_name)
    Bs = [ref.binary((8, 33), torch.float32, seed=8), ref.binary((5, 8), torch.float32, seed=9).t()]
    whole = torch.cat([ref.binary((19, 8), torch.float32, seed=rank) for rank in range(me.world)])
    for shard in (A, A.clone()):
        with fused(2), recorded() as kinds:
            _, products = ops.fused_all_gather_matmul(shard, Bs, 0, me.group_name, return_A=False)
        assert kinds.count("tiles") == 1
        assert kinds.count("raise") == 2 * (me.world - 1)
        assert ("announce" in kinds) == (shard is A)
        for product, B in zip(products, Bs, strict=True):
            torch.testing.assert_close(product, whole @ B, rtol=0, atol=0)
    shard = A.clone().requires_grad_()
    with fused():
        symm_overlap.all_gather_matmul(shard, Bs[:1], 0, me.group)[1][0].sum().backward()
    assert torch.equal(shard.grad, me.world * Bs[0].sum(1).expand(19, 8))


def test_one_launch_for_each_call(ranks: Pool) -> None:
    ranks.run(4, kernel_runs_once_while_copies_come)


def late(me: Rank, op: str) -> None:
    """One rank comes late, and on another every copy is slow: the kernels wait, for that and no more."""
    A, B = ref.binary((4 * me.world, 6), torch.float32, seed=me.rank), ref.binary((6, 5), torch.float32, seed=9)
    for turn in range(me.world):
        dist.barrier(me.group)
        if me.rank == turn:
            time.sleep(0.1)
        with fused(2), at("raise", 1, lambda step: time.sleep(0.05 * me.rank)):
            _, (product,) = ops.fused_all_gather_matmul(A, [B], 0, me.group_name, return_A=False)
        whole = torch.cat([ref.binary(A.shape, torch.float32, seed=rank) for rank in range(me.world)])
        torch.testing.assert_close(product, whole @ B, rtol=0, atol=0)


def test_a_late_rank_and_late_copies_are_waited_for(ranks: Pool) -> None:
    ranks.run(4, late, "all_gather_matmul")


def one_never_calls(me: Rank, op: str, lane: int) -> str:
    with fused(), symm_overlap.lane(lane), symm_overlap.timeout(0.5), comparing(False):
        with symm_overlap.timeout(20):
            FUSED[op](me.group_name)
        if me.rank == 1:
            return ""
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError) as raised:
            FUSED[op](me.group_name)
        assert 0.4 < time.monotonic() - start < 3
        with pytest.raises(RuntimeError, match="out of step"):
            FUSED[op](me.group_name)
    return told(raised.value)


@pytest.mark.parametrize("op", FUSED)
def test_a_rank_that_never_calls_is_named_after_the_deadline(
    ranks: Pool, fresh_lane: Callable[[], int], op: str
) -> None:
    for rank, message in enumerate(ranks.run(3, one_never_calls, op, fresh_lane())):
        if rank != 1:
            assert "rank 1" in message
            assert op in message


def twice(op: str, name: str) -> None:
    """A rank may have got all that it needs for the call in which another one dies."""
    FUSED[op](name)
    FUSED[op](name)


def one_dies(me: Rank, op: str, kind: str) -> tuple[str, float]:
    def die(step: Step) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with fused(), comparing(False):
        FUSED[op](me.group_name)
        start = time.monotonic()
        with at(kind, 0, die) if me.rank == 1 else comparing(False), pytest.raises(dist.DistBackendError) as raised:
            twice(op, me.group_name)
    return told(raised.value), time.monotonic() - start


@pytest.mark.parametrize(("op", "kind"), [("all_gather_matmul", "tiles"), ("matmul_reduce_scatter", "push")])
def test_when_a_rank_dies_the_others_learn_it_at_once(fresh_ranks: Callable[..., Pool], op: str, kind: str) -> None:
    pool = fresh_ranks(4)
    pid = pool.pid(1)
    found = pool.submit((0, 1, 2, 3), one_dies, op, kind).outcomes()
    assert "killed by SIGKILL" in str(found[1].failure)
    for rank in (0, 2, 3):
        assert found[rank].failure is None, found[rank].failure
        message, seconds = found[rank].value
        assert seconds < 20  # far from the deadline, 300 s
        assert f"rank 1 (pid {pid})" in message


# --- the choice


def test_the_path_is_taken_only_when_forced_and_only_where_there_is_a_kernel() -> None:
    shape = {"m": 4096, "n": 512, "k": 512, "world": 4}
    for device in ("cpu", "cuda"):
        assert explain("all_gather_matmul", **shape, device=device).path != "fused"
        with symm_overlap.force_path("fused"):
            choice = explain("all_gather_matmul", **shape, device=device)
            assert (choice.path, choice.exchange, choice.copy) == ("fused", "fused", "copy")
            other = explain("all_gather", m=4096, n=512, k=0, world=4, device=device)
            assert (other.path, other.exchange) == ("pipelined", "planned")
            assert "no kernel for this" in other.reason
            with pytest.raises(ValueError, match="'fused' is forced, but these ranks cannot reach"):
                explain("all_gather_matmul", **shape, device=device, direct=False)


def without_the_interpreter(me: Rank) -> None:
    module = kernels("all_gather_matmul")
    with fused(), mock.patch.object(module, "INTERPRETED", False):
        for _ in range(2):  # nothing has begun, so the lane is in step
            with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before its first call"):
                ops.fused_all_gather_matmul(ones(4, 6), [ones(6, 5)], 0, me.group_name)


def test_kernels_for_gpus_are_rejected_before_the_call_begins(ranks: Pool) -> None:
    ranks.run(2, without_the_interpreter)


def test_sums_and_what_is_kept_are_told_as_pipelined() -> None:
    a, b = torch.ones(8, 3), torch.ones(3, 5)
    forced = replace(current(), path="fused")
    for As, addend, more, path in (
        ([a], None, (), "fused"),
        ([a, a], None, (), "pipelined"),
        ([a], torch.ones(8, 5), (), "pipelined"),
        ([a], None, (("keep", 0),), "pipelined"),
    ):
        described = describe_scatter("matmul_reduce_scatter", As, [b] * len(As), addend, (8, 5), "sum", 0, 2, more)
        assert choose(described.problem, forced, direct=True).path == path
