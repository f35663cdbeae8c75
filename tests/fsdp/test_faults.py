"""A failure on one rank ends the step on all ranks with a message that says where, and no rank waits for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import symm_overlap.fsdp
from symm_overlap import timeout
from tests.fsdp.trained import Block, batch, blocks, loss_of, model, sharded, train
from tests.ranks import Pool, Rank


def dies(me: Rank, where: str) -> str:
    made = sharded(me, model())
    symm_overlap.fsdp.apply(made)
    train(me, made, partial(loss_of, me), 2)
    block: Any = blocks(made)[1]
    if me.rank == 1:  # it dies while its peers are in the block's all-gather or reduce-scatter
        params = block._get_fsdp_state()._fsdp_param_group
        comm = params._all_gather_comm if where == "all-gather" else params._reduce_scatter_comm
        comm.allocate = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with timeout(30), pytest.raises(RuntimeError) as raised:
        loss_of(me, made, 2)
    assert time.monotonic() - began < 15
    return str(raised.value)


@pytest.mark.parametrize("where", ["all-gather", "reduce-scatter"])
def test_a_rank_that_is_killed_is_named_by_every_other(fresh_ranks: Callable[..., Pool], where: str) -> None:
    outcomes = fresh_ranks(3).submit((0, 1, 2), dies, where).outcomes(90)
    for rank in (0, 2):
        assert outcomes[rank].failure is None, outcomes[rank].failure
        assert f"FSDP {where}" in outcomes[rank].value
        assert "rank 1" in outcomes[rank].value


def other_shapes(me: Rank, wider: int) -> str:
    """A parameter and its gather are larger on one rank. If ``wider`` is large, that gather needs more memory."""
    made = sharded(me, nn.Sequential(model(), nn.Linear(3, 40 if me.rank != 1 else wider).double()))

    def step() -> None:
        symm_overlap.fsdp.apply(made)
        loss_of(me, made, 0)

    with timeout(20), pytest.raises(RuntimeError) as raised:
        step()
    return str(raised.value)


@pytest.mark.parametrize("wider", [50, 40_000])
def test_a_rank_with_other_shapes_is_an_error_on_all(ranks: Pool, wider: int) -> None:
    for message in ranks.run(3, other_shapes, wider):
        assert "FSDP all-gather" in message


def resized(me: Rank, numel: int) -> str:
    """After a planned step, a parameter and its gather have another number of elements on one rank."""
    made = sharded(me, model())
    symm_overlap.fsdp.apply(made)
    plan = symm_overlap.fsdp.plan_prefetch(made, "depth=2", verbose=False)
    train(me, made, partial(loss_of, me), 2)
    assert plan.status == "planned"
    block: Any = blocks(made)[1]
    if me.rank == 1:
        block._get_fsdp_state()._fsdp_param_group.fsdp_params[0]._sharded_param_data = batch(0, 0).new_zeros(numel)
    with timeout(20), pytest.raises(RuntimeError) as raised:
        loss_of(me, made, 2)
    return str(raised.value)


@pytest.mark.parametrize("numel", [1, 40_000])
def test_a_parameter_that_is_resized_on_one_rank_is_an_error_on_all(ranks: Pool, numel: int) -> None:
    for message in ranks.run(2, resized, numel):
        assert "FSDP all-gather" in message


def other_order(me: Rank) -> str:
    """One rank runs its blocks in another order. The blocks are alike, so only their position tells them apart."""
    made = sharded(me, nn.Sequential(*(Block(7) for _ in range(4))).double())
    symm_overlap.fsdp.apply(made)

    def forward(x: Tensor) -> Tensor:
        for index in (0, 1, 2, 3) if me.rank == 0 else (0, 2, 1, 3):
            x = made[index](x)  # type: ignore[index]
        return x

    with timeout(20), pytest.raises(dist.DistBackendError) as raised:
        forward(batch(0, me.rank))
    return str(raised.value)


def test_modules_in_another_order_are_an_error_on_all(ranks: Pool) -> None:
    for rank, message in enumerate(ranks.run(2, other_order)):
        assert "FSDP all-gather" in message
        assert f"rank {1 - rank}" in message


def late_after_apply(me: Rank) -> None:
    made = sharded(me, model())
    with timeout(1):
        symm_overlap.fsdp.apply(made)
    dist.barrier(me.group)
    if me.rank == 1:
        time.sleep(2.5)
    loss_of(me, made, 0)


def test_a_limit_around_apply_is_not_one_of_later_steps(ranks: Pool) -> None:
    ranks.run(2, late_after_apply)


class Failing(nn.Module):
    """A layer that fails in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("planted")


def goes_on(me: Rank) -> None:
    """After a step that failed on one rank, all ranks call apply on a new model and train it."""
    made: Any = sharded(me, model())
    symm_overlap.fsdp.apply(made)
    kept, failing = made[1], Failing()
    if me.rank == 1:
        made[1] = failing
    with timeout(2), pytest.raises((ArithmeticError, RuntimeError)):
        loss_of(me, made, 0)
    dist.barrier(me.group)
    made[1] = kept
    whole = sharded(me, model())
    symm_overlap.fsdp.apply(whole)
    expected = sharded(me, model())
    for found, wanted in zip(*(train(me, each, partial(loss_of, me), 2) for each in (whole, expected)), strict=True):
        torch.testing.assert_close(found, wanted)


def test_after_a_failed_step_a_new_model_trains(ranks: Pool) -> None:
    ranks.run(2, goes_on)
