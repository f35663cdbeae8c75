"""The fused exchange on CPU ranks: kernels run in Triton's interpreter and wait for real copies from real peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem

import symm_overlap
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.explain import explain
from symm_overlap.collective.ops.matmul_reduce_scatter import describe_scatter
from symm_overlap.runtime.cpu.backend import CpuBackend
from symm_overlap.settings import current
from tests.collective import reference as ref
from tests.collective.scaled_cases import (
    E4M3,
    E5M2,
    K,
    bits,
    float8,
    powers_of_two,
    rows_can_be_scaled,
    scaled_mm,
    weight,
)
from tests.kernels.interpreted import kernels, without_overflow_checks
from tests.ranks import Pool, Rank
from tests.transforms import choices, recorded

ops = torch.ops.symm_overlap
FUSED: dict[str, Callable[[str], object]] = {
    "all_gather_matmul": lambda name: ops.fused_all_gather_matmul(ones(4, 6), [ones(6, 5)], 0, name),
    "matmul_reduce_scatter": lambda name: ops.fused_matmul_reduce_scatter(ones(12, 6), ones(6, 5), "sum", 0, name),
    "matmul_all_reduce": lambda name: ops.fused_matmul_all_reduce(ones(10, 6), ones(6, 5), "sum", name),
}
KERNELS = "all_gather_matmul", "matmul_reduce_scatter"


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def import_kernels() -> None:
    """Import the kernels for Triton's interpreter."""
    for name in KERNELS:
        kernels(name)


@contextmanager
def fused(chunks: int = 1) -> Iterator[None]:
    import_kernels()
    with without_overflow_checks(), symm_overlap.force_path("fused", chunks=chunks):
        yield


def all_gather_matmul(me: Rank, chunks: int, dtype: torch.dtype) -> None:
    Bs = [ref.binary((4, 2), dtype, seed=8), ref.binary((7, 4), dtype, seed=9).t()]
    for dim, return_A in ((0, True), (1, False), (2, True)):
        A = ref.binary((5, 3, 4), dtype, seed=me.rank)
        weights = [B.repeat(me.world, 1) for B in Bs] if dim == 2 else Bs
        expected_A, expected = ref.torch_all_gather_matmul(A, weights, dim, me)
        biases = [[torch.arange(2.0), torch.zeros(0)], [torch.arange(2.0), torch.arange(7.0)], None][dim]
        if biases is not None:
            biases = [bias.to(dtype) for bias in biases]
            expected = [y + bias if len(bias) else y for y, bias in zip(expected, biases, strict=True)]
        with fused(chunks), choices() as made:
            found_A, found = ops.fused_all_gather_matmul(A, weights, dim, me.group_name, biases, return_A=return_A)
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
        bias = torch.arange(float(columns)).to(dtype) if dim else None
        expected = ref.torch_matmul_reduce_scatter(A, B, "sum", dim, me)
        if bias is not None:
            mine = bias.chunk(me.world)[me.rank] if dim == 2 else bias
            expected = expected + (mine if reduce_op == "avg" else mine * me.world)
        with fused(chunks), choices() as made:
            found = ops.fused_matmul_reduce_scatter(A * scale, B, reduce_op, dim, me.group_name, bias)
        assert made[-1][1].path == ("pipelined" if dim == 2 else "fused")
        ref.same(found, expected)


def matmul_all_reduce(me: Rank, chunks: int, dtype: torch.dtype) -> None:
    """Rows do not divide evenly among ranks, or are fewer than ranks. Inputs are not contiguous. Ranks add a bias."""
    B = ref.binary((6, 4), dtype, seed=9).t()
    for shape, biased, reduce_op in (((7, 3, 4), True, "sum"), ((3, 4), False, "avg"), ((9, 4), True, "sum")):
        As = [ref.binary((*shape[:-1], 8), dtype, seed=rank)[..., ::2] for rank in range(me.world)]
        bias = torch.arange(6.0).to(dtype) if biased else None
        scale = me.world if reduce_op == "avg" else 1
        expected = sum((A.float() @ B.float() + (0 if bias is None else bias)) for A in As).to(dtype)
        with fused(chunks), choices() as made, recorded() as kinds:
            found = ops.fused_matmul_all_reduce(As[me.rank] * scale, B, reduce_op, me.group_name, bias)
        choice = made[-1][1]
        assert choice.path == "fused"
        assert (kinds.count("tiles"), kinds.count("pull")) == (1, choice.chunks * (me.world - 1))
        ref.same(found, expected)


def scaled(me: Rank, chunks: int, dtype: torch.dtype) -> None:
    """Float8 with one scale, or with one for each row and column. One weight has a bias.

    Products are in ``dtype`` and in float8. A result scale affects only products in float8.
    """
    rows = 3 * me.world
    for per_row in (False, True) if rows_can_be_scaled() else (False,):
        As = [float8(rows, 2, K, seed=rank, dtype=E5M2 if per_row else E4M3) for rank in range(me.world)]
        shape = (rows, 2, 1)
        scales = [powers_of_two(shape, seed=rank) if per_row else torch.tensor(0.5) for rank in range(me.world)]
        Bs = [weight(K, n, seed=n) for n in (17, 3, 5, 2)]
        B_scales = [powers_of_two((1, B.shape[1]), seed=8) if per_row else torch.tensor(2.0) for B in Bs]
        bias, mine = torch.arange(17.0).to(torch.bfloat16), me.rank
        dim = int(per_row)
        biases, outs = [bias, None, None, None], [dtype, *[E5M2 if per_row else E4M3] * 3]
        result_scales = [torch.tensor(0.5), torch.tensor(0.25), None, torch.tensor(2.0)]
        whole = torch.cat([A.float() for A in As], dim).to(As[0].dtype)
        of_rows = torch.cat(scales, dim) if per_row else scales[0]
        each = zip(Bs, B_scales, biases, outs, result_scales, strict=True)
        expected = [scaled_mm(whole, B, of_rows, *rest) for B, *rest in each]
        with fused(chunks), choices() as made, recorded() as kinds:
            arguments = (As[mine], Bs, scales[mine], B_scales, dim, me.group_name, biases, result_scales, outs)
            _, found = ops.fused_all_gather_scaled_matmul(*arguments, [False, True, True, True])
        assert made[-1][1].path == "fused"
        assert kinds.count("tiles") == 1
        torch.testing.assert_close(list(map(bits, found)), list(map(bits, expected)), rtol=0, atol=0)
        partials = [(A.float() * scale) @ (Bs[0].float() * B_scales[0]) for A, scale in zip(As, scales, strict=True)]
        rest = ("sum", 0, 0, me.group_name, [rows, 2, 17], bias, None, dtype, False)
        with fused(chunks), choices() as made, recorded() as kinds:
            part = ops.fused_scaled_matmul_reduce_scatter(As[mine], Bs[0], scales[mine], B_scales[0], *rest)
        assert made[-1][1].path == "fused"
        assert kinds.count("tiles") == 1
        expected = sum((partial + bias.float()).to(dtype).float() for partial in partials).to(dtype)
        ref.same(part, expected.chunk(me.world)[mine])


VALUES = {each.__name__: each for each in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, scaled)}


def values(me: Rank, op: str, chunks: int, dtype: torch.dtype) -> None:
    VALUES[op](me, chunks, dtype)


# `tests/kernels` tests the other dtypes.
@pytest.mark.parametrize(("world", "chunks", "dtype"), [(2, 3, torch.bfloat16), (4, 1, torch.float32)])
@pytest.mark.parametrize("op", VALUES)
def test_exact_values_and_strides_of_the_reference(
    ranks: Pool, op: str, world: int, chunks: int, dtype: torch.dtype
) -> None:
    ranks.run(world, values, op, chunks, dtype)


def kernel_runs_once_while_copies_come(me: Rank) -> None:
    """A call is one launch for tiles of all ranks, weights of both layouts, and an input in place or published."""
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


# --- the choice


def left_to_torch(me: Rank) -> None:
    """Matmuls that tensor cores or this package's kernels do not support use no kernel and have the same values."""
    A, B, one = float8(4, K, seed=me.rank), weight(K, 16, seed=3), torch.tensor(1.0)
    whole = torch.cat([float8(4, K, seed=rank).float() for rank in range(me.world)]) @ B.float()
    with fused(), recorded() as kinds, mock.patch.object(CpuBackend, "machine", return_value=(80, 2)):
        _, (found,) = symm_overlap.all_gather_scaled_matmul(A, [B], one, [one], 0, me.group)
    assert "tiles" not in kinds
    ref.same(found, whole.bfloat16())
    lists: list[list[Any]] = [[A, A], [B, B], [one, one], [one, one], [None, None], [None, None]]
    with fused(), choices() as made:
        rest = (None, "sum", 0, me.group_name, torch.bfloat16, [False, False])
        part = ops.fused_scaled_matmuls_reduce_scatter(*lists, *rest)
    assert made[-1][1].path == "pipelined"
    total = 2 * sum(whole.chunk(me.world))
    ref.same(part, total.bfloat16().chunk(me.world)[me.rank])


def test_sums_and_float8_on_older_gpus_are_left_to_torch(ranks: Pool) -> None:
    ranks.run(2, left_to_torch)


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
        for _ in range(2):  # no call has begun, so the lane stays in step
            with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before its first call"):
                ops.fused_all_gather_matmul(ones(4, 6), [ones(6, 5)], 0, me.group_name)


def test_kernels_for_gpus_are_rejected_before_the_call_begins(ranks: Pool) -> None:
    ranks.run(2, without_the_interpreter)


def test_sums_and_what_is_kept_are_told_as_pipelined() -> None:
    """Forced to fused, sums of several products or addends and kept products use the path pipelined instead."""
    a, b = torch.ones(8, 3), torch.ones(3, 5)
    forced = replace(current(), path="fused")
    for As, addend, more, path in (
        ([a], None, (), "fused"),
        ([a, a], None, (), "pipelined"),
        ([a], torch.ones(8, 5), (), "pipelined"),
        ([a], None, (("keep", 0),), "pipelined"),
    ):
        described = describe_scatter("matmul_reduce_scatter", As, [b] * len(As), [], addend, (8, 5), "sum", 0, 2, more)
        assert choose(described.problem, forced, direct=True).path == path
