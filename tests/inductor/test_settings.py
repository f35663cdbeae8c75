"""Settings that are given at compile time reach the ops of compiled graphs, and blocks around calls override them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd

import symm_overlap
from symm_overlap.runtime import state_of
from tests.inductor.test_compile import gathered_product, start_anew, without_cached_graphs
from tests.ranks import Pool, Rank
from tests.transforms import comparing, recorded


@without_cached_graphs
def with_settings(me: Rank, folder: str, one: int, two: int) -> None:
    program, calls = gathered_product(me), state_of(me.group).calls
    x, weight = torch.ones(6, 4), torch.ones(4, 4)

    def steps_of(function: Callable[[], Any]) -> list[str]:
        with comparing(False), recorded() as kinds:
            function()
        return kinds

    start_anew(folder)
    compiled = torch.compile(program, options=symm_overlap.inductor.options(path="pipelined", chunks=3, lane=one))
    before = Counter(calls)
    found = steps_of(lambda: compiled(x, weight))
    with symm_overlap.force_path("pipelined", chunks=3):
        expected = steps_of(lambda: symm_overlap.all_gather_matmul(x, [weight], 0, me.group, return_A=False))
    with symm_overlap.force_path("sequential"):
        other = steps_of(lambda: symm_overlap.all_gather_matmul(x, [weight], 0, me.group, return_A=False))
    assert found == expected != other
    assert calls[one] == before[one] + 1
    with comparing(False), symm_overlap.lane(two), symm_overlap.force_path("sequential"):
        assert steps_of(lambda: compiled(x, weight)) == other, "a block around the call overrides"
    assert (calls[one], calls[two]) == (before[one] + 1, before[two] + 1)


def test_settings_given_at_compile_time_reach_the_ops_and_blocks_override_them(
    ranks: Pool, tmp_path: Any, fresh_lane: Callable[[], int]
) -> None:
    ranks.run(2, with_settings, str(tmp_path), fresh_lane(), fresh_lane(), timeout=120)


@without_cached_graphs
def backward_with_settings(me: Rank, folder: str, one: int, two: int) -> None:
    start_anew(folder)
    options = symm_overlap.inductor.options(path="sequential", lane=one)
    program = torch.compile(lambda x, w: all_gather_tensor_autograd(x, 0, me.group) @ w, options=options)
    x, weight, calls = torch.ones(6, 4, requires_grad=True), torch.ones(4, 4), state_of(me.group).calls
    with comparing(False):
        for number, around in enumerate((nullcontext(), symm_overlap.lane(two))):
            y = program(x, weight)
            before = Counter(calls)
            with around:
                y.sum().backward()
            assert Counter(calls) - before == {(one, two)[number]: 1}, "the sum of the gradients of x"


def test_settings_given_at_compile_time_reach_backward_passes_and_blocks_override_them(
    ranks: Pool, tmp_path: Any, fresh_lane: Callable[[], int]
) -> None:
    ranks.run(2, backward_with_settings, str(tmp_path), fresh_lane(), fresh_lane(), timeout=120)


@without_cached_graphs
def alone(me: Rank, folder: str, lane: int) -> None:
    start_anew(folder)
    x, weight = torch.ones(6, 4), torch.ones(4, 4)
    compiled = torch.compile(gathered_product(me), options=symm_overlap.inductor.options(timeout=0.3, lane=lane))
    with comparing(False), symm_overlap.lane(lane):
        symm_overlap.all_gather_matmul(x, [weight], 0, me.group)  # so that the ranks know each other
    if me.rank == 0:
        start = time.monotonic()
        said = r"(?s)did not signal after 0\.3.*in a graph of torch\.compile.*compare symm_overlap\.inductor\.report"
        with comparing(False), pytest.raises(dist.DistBackendError, match=said):
            compiled(x, weight)
        assert time.monotonic() - start < 60
    dist.barrier(me.group)


def test_the_deadline_given_at_compile_time_holds(ranks: Pool, tmp_path: Any, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, alone, str(tmp_path), fresh_lane(), timeout=120)
