"""On the path c10d, a whole call is the plain collective and one matmul, without copies between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import symm_overlap
from symm_overlap.collective.exchange import c10d
from symm_overlap.runtime.cpu.backend import CpuBackend
from tests.ranks import Pool, Rank

ops = torch.ops.symm_overlap


@contextmanager
def counted() -> Iterator[dict[str, list[Any]]]:
    """Record the shapes of all matmuls and the addresses of the memory that all-gathers write."""
    seen: dict[str, list[Any]] = {"matmuls": [], "gathered into": []}
    multiply, gather = CpuBackend.multiply, c10d.all_gather_single

    def multiplied(a: Tensor, b: Tensor, out: Tensor, add: bool = False, bias: Tensor | None = None) -> None:
        seen["matmuls"].append((tuple(a.shape), tuple(b.shape)))
        multiply(a, b, out, add, bias)

    def gathered(target: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen["gathered into"].append(target.data_ptr())
        return gather(target, *args, **kwargs)

    with (
        mock.patch.object(CpuBackend, "multiply", staticmethod(multiplied)),
        mock.patch.object(c10d, "all_gather_single", gathered),
    ):
        yield seen


def whole_calls(me: Rank) -> None:
    w, A, B = me.world, torch.ones(4, 6), torch.ones(6, 5)
    with symm_overlap.force_path("c10d"):
        with counted() as seen:
            gathered, _ = ops.fused_all_gather_matmul(A, [B, B], 0, me.group_name)
        assert seen == {"matmuls": [((4 * w, 6), (6, 5))] * 2, "gathered into": [gathered.data_ptr()]}
        with counted() as seen:
            gathered = ops.all_gather(A, 0, me.group_name)
        assert seen == {"matmuls": [], "gathered into": [gathered.data_ptr()]}
        with counted() as seen:
            ops.fused_matmul_reduce_scatter(torch.ones(4 * w, 6), B, "sum", 0, me.group_name)
        assert seen == {"matmuls": [((4 * w, 6), (6, 5))], "gathered into": []}
        with counted() as seen:
            reduced = ops.fused_matmul_all_reduce(torch.ones(4 * w, 6), B, "sum", me.group_name)
        assert seen == {"matmuls": [((4 * w, 6), (6, 5))], "gathered into": [reduced.data_ptr()]}


@pytest.mark.parametrize("world", [2, 3])
def test_a_whole_call_is_one_collective_and_one_matmul(ranks: Pool, world: int) -> None:
    ranks.run(world, whole_calls)


def calls_in_parts(me: Rank, chunks: int) -> None:
    """Every part is multiplied by itself. The local shard comes first, while the first chunks are in flight."""
    w, A, B = me.world, torch.ones(4, 6), torch.ones(6, 5)
    with symm_overlap.force_path("c10d", chunks=chunks):
        for return_A in (True, False):
            with counted() as seen:
                gathered, _ = ops.fused_all_gather_matmul(A, [B], 0, me.group_name, return_A=return_A)
            assert seen["matmuls"] == [((4 // chunks, 6), (6, 5))] * w * chunks
            assert len(seen["gathered into"]) == chunks
            if gathered is not None:
                assert (seen["gathered into"] == [gathered.data_ptr()]) == (chunks == 1)
        with counted() as seen:
            ops.fused_matmul_reduce_scatter(torch.ones(4 * w, 6), B, "sum", 0, me.group_name)
        assert seen["matmuls"] == [((4 // chunks, 6), (6, 5))] * w * chunks


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_a_call_in_parts_multiplies_each_part_by_itself(ranks: Pool, world: int, chunks: int) -> None:
    ranks.run(world, calls_in_parts, chunks)
