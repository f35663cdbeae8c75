"""Every op has the values and strides of torch's reference, for every dimension, dtype, world size and path."""

from __future__ import annotations

import itertools

import pytest
import torch

import symm_overlap
from tests.collective import reference as ref
from tests.quick import one_in
from tests.ranks import Pool, Rank

PATHS = [
    None,
    ("sequential", 1, 1),
    ("pipelined", 1, 1),
    ("pipelined", 3, 1),
    ("pipelined", 2, 2),
    ("c10d", 1, 1),
    ("c10d", 3, 1),
]
ops = torch.ops.symm_overlap


def on_path(path: tuple[str, int, int] | None):
    if path is None:
        return symm_overlap.force_path(None)
    return symm_overlap.force_path(path[0], chunks=path[1], streams=path[2])


def gather_shapes(dim: int, world: int) -> tuple[tuple[int, ...], int]:
    """Return a shard's shape and the rows of a weight. Not every tested number of chunks divides the shard's rows."""
    shape = (5, 3, 4)
    return shape, shape[-1] * (world if dim == 2 else 1)


def all_gather_matmul(me: Rank, path, dtype: torch.dtype) -> None:
    name = me.group.group_name
    for dim, return_A in itertools.product(range(3), (True, False)):
        shape, rows = gather_shapes(dim, me.world)
        A = ref.binary(shape, dtype, seed=me.rank)
        Bs = [ref.binary((rows, columns), dtype, seed=10 + columns) for columns in (2, 7)]
        expected_A, expected = ref.torch_all_gather_matmul(A, Bs, dim, me)
        with on_path(path):
            for _ in range(3):
                found_A, found = ops.fused_all_gather_matmul(A, Bs, dim, name, return_A=return_A)
                assert len(found) == len(Bs)
                for y, e in zip(found, expected, strict=True):
                    ref.same(y, e)
                if return_A:
                    ref.same(found_A, expected_A)
                else:
                    assert found_A is None
            gathered = symm_overlap.all_gather(A, dim, me.group)
            assert gathered.is_contiguous()
            torch.testing.assert_close(gathered, expected_A, rtol=0, atol=0)


def matmul_reduce_scatter(me: Rank, path, dtype: torch.dtype) -> None:
    name = me.group.group_name
    for dim, reduce_op in itertools.product(range(3), ("sum", "avg")):
        shape, columns = [5, 3, 4], 6 * (me.world if dim == 2 else 1)
        if dim < 2:
            shape[dim] *= me.world
        A, B = ref.binary(shape, dtype, seed=me.rank), ref.binary((4, columns), dtype, seed=9)
        if reduce_op == "avg":
            A = A * me.world  # so that the mean is a whole number, as exact as the sum
        expected = ref.torch_matmul_reduce_scatter(A, B, "sum", dim, me) / (me.world if reduce_op == "avg" else 1)
        with on_path(path):
            for _ in range(3):
                ref.same(ops.fused_matmul_reduce_scatter(A, B, reduce_op, dim, name), expected)
            ref.same(symm_overlap.reduce_scatter(A @ B, reduce_op, dim, me.group), expected)


def matmul_all_reduce(me: Rank, path, dtype: torch.dtype) -> None:
    name = me.group.group_name
    for rows, reduce_op in itertools.product((1, 2, 11), ("sum", "avg")):
        A, B = ref.binary((rows, 2, 4), dtype, seed=me.rank), ref.binary((4, 6), dtype, seed=9)
        if reduce_op == "avg":
            A = A * me.world
        expected = ref.torch_all_reduce(A @ B, "sum", me) / (me.world if reduce_op == "avg" else 1)
        with on_path(path):
            for _ in range(3):
                ref.same(ops.fused_matmul_all_reduce(A, B, reduce_op, name), expected)
            ref.same(ops.all_reduce(A @ B, reduce_op, name), expected)


OPS = {op.__name__: op for op in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("world", one_in(2, [1, 2, 3, 5], first=1))
def test_exact_values_and_strides_of_the_reference_on_every_path(ranks: Pool, world: int, path, op: str) -> None:
    ranks.run(world, OPS[op], path, torch.float32)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("path", [PATHS[2], PATHS[4], PATHS[5]], ids=str)
@pytest.mark.parametrize("dtype", one_in(2, [torch.bfloat16, torch.float64, torch.float16]), ids=str)  # float32: above
def test_exact_values_in_every_other_dtype(ranks: Pool, dtype: torch.dtype, path, op: str) -> None:
    ranks.run(3, OPS[op], path, dtype)


def large_shards(me: Rank, path) -> None:
    """Test copies that bypass the caches, and another matmul library. Neither is used for less than a mebibyte."""
    name, rows, k, n = me.group.group_name, 520, 516, 40
    Bs = [ref.binary((k, n), torch.float32, seed=8), ref.binary((3 * n, k), torch.float32, seed=9).t()]
    for call in range(3):
        A = ref.binary((rows, k), torch.float32, seed=10 * call + me.rank)
        assert A.nbytes > 1 << 20
        expected_A, expected = ref.torch_all_gather_matmul(A, Bs, 0, me)
        whole = expected_A * (me.rank + 1)
        scattered = ref.torch_matmul_reduce_scatter(whole, Bs[0], "sum", 0, me)
        reduced = ref.torch_all_reduce(whole @ Bs[1], "sum", me)
        grads = [expected_A.t() @ product for product in expected]
        with on_path(path):
            found_A, found = ops.fused_all_gather_matmul(A, Bs, 0, name)
            ref.same(found_A, expected_A)
            _, without = ops.fused_all_gather_matmul(A, Bs, 0, name, return_A=False)
            for y, z, e in zip(found, without, expected, strict=True):
                ref.same(y, e)
                ref.same(z, e)
            ref.same(symm_overlap.all_gather(A, 0, me.group), expected_A)
            ref.same(ops.fused_matmul_reduce_scatter(whole, Bs[0], "sum", 0, name), scattered)
            ref.same(ops.fused_matmul_all_reduce(whole, Bs[1], "sum", name), reduced)
            for y, e in zip(ops.all_gather_weight_grad(A, expected, 0, name), grads, strict=True):
                ref.same(y, e)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_exact_values_of_large_shards(ranks: Pool, path) -> None:
    ranks.run(2, large_shards, path)
