"""The fused exchange if ranks are late, die, or never make the call."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap.plan import Step
from tests.collective import reference as ref
from tests.collective.test_failures import told
from tests.collective.test_fused import FUSED, fused
from tests.limits import SOON
from tests.ranks import Pool, Rank
from tests.transforms import at, comparing

ops = torch.ops.symm_overlap


def late(me: Rank) -> None:
    """In turn, one rank is late. Some copies of other ranks are slow. The kernels wait for both."""
    As = [ref.binary((4 * me.world, 6), torch.float32, seed=rank) for rank in range(me.world)]
    B, mine = ref.binary((6, 5), torch.float32, seed=9), As[me.rank]
    total = sum(A @ B for A in As)
    for turn in range(me.world):
        dist.barrier(me.group)
        if me.rank == turn:
            time.sleep(0.1)
        with fused(2), at("raise", 1, lambda step: time.sleep(0.05 * me.rank)):
            _, (product,) = ops.fused_all_gather_matmul(mine, [B], 0, me.group_name, return_A=False)
        with fused(2), at("push", 1, lambda step: time.sleep(0.02 * me.rank)):
            part = ops.fused_matmul_reduce_scatter(mine, B, "sum", 0, me.group_name)
            reduced = ops.fused_matmul_all_reduce(mine, B, "sum", me.group_name)
        ref.same(product, torch.cat(As) @ B)
        ref.same(part, total.chunk(me.world)[me.rank])
        ref.same(reduced, total)


@pytest.mark.slow
def test_a_late_rank_and_late_copies_are_waited_for(ranks: Pool) -> None:
    ranks.run(4, late)


def one_never_calls(me: Rank, op: str, lane: int) -> str:
    with fused(), symm_overlap.lane(lane), symm_overlap.timeout(0.5), comparing(False):
        with symm_overlap.timeout(20):
            FUSED[op](me.group_name)
        if me.rank == 1:
            return ""
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError) as raised:
            FUSED[op](me.group_name)
        assert 0.4 < time.monotonic() - start < SOON
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
    """Call twice: a rank may already have all its data for the call in which another rank dies."""
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


@pytest.mark.parametrize(("op", "kind"), [("all_gather_matmul", "tiles"), ("matmul_all_reduce", "pull")])
def test_when_a_rank_dies_the_others_learn_it_at_once(fresh_ranks: Callable[..., Pool], op: str, kind: str) -> None:
    pool = fresh_ranks(4)
    pid = pool.pid(1)
    found = pool.submit((0, 1, 2, 3), one_dies, op, kind).outcomes()
    assert "killed by SIGKILL" in str(found[1].failure)
    for rank in (0, 2, 3):
        assert found[rank].failure is None, found[rank].failure
        message, seconds = found[rank].value
        assert seconds < 20  # far below the deadline of 300 s
        assert f"rank 1 (pid {pid})" in message
