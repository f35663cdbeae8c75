"""Calls leave no reference cycles: their tensors are freed when the caller drops them, not at the next collection."""

from __future__ import annotations

import gc
import time

import pytest
import torch

import symm_overlap
from tests.ranks import Pool, Rank


def tensors_left(me: Rank, path: str) -> int:
    A, B = torch.ones(4 * me.world, 6, requires_grad=True), torch.ones(6, 4, requires_grad=True)

    def calls() -> None:
        for return_A in (True, False):
            _, (y,) = symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=return_A)
            y.sum().backward()
        symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group).sum().backward()
        symm_overlap.matmul_all_reduce(A, B, "sum", me.group).sum().backward()
        symm_overlap.all_gather(A, 0, me.group)

    def tensors() -> int:
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    with symm_overlap.force_path(path):
        for _ in range(2):  # twice, because the first call empties the lane's cache of views if it is full
            calls()
        gc.collect()
        gc.disable()
        try:
            time.sleep(0.2)  # gloo's thread may still hold tensors of the calls before
            before = tensors()
            calls()
            left, deadline = 1, time.monotonic() + 20
            while left and time.monotonic() < deadline:  # it may still hold the tensors of the last call
                left = tensors() - before
            return left
        finally:
            gc.enable()


@pytest.mark.parametrize("path", ["sequential", "pipelined", "c10d"])
def test_calls_leave_no_tensors_in_reference_cycles(ranks: Pool, path: str) -> None:
    assert ranks.run(2, tensors_left, path) == [0, 0]
