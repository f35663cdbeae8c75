"""A rank that dies, or comes late, while the ranks make the group for their messages, is noticed by the others."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

import symm_overlap
from symm_overlap.pipeline.runtime import step_runner
from tests.limits import SOON
from tests.pipeline.runtime.models import Layer, batch, squared
from tests.pipeline.runtime.test_contract import runtime_of
from tests.ranks import Pool, Rank


def dies_before_the_first_message(me: Rank, victim: int) -> str:
    runtime = runtime_of(me, "1F1B", 4, [Layer(stage) for stage in range(me.world)], loss=squared, transport="c10d")
    x, target = batch(4)
    if me.rank == victim:  # the ranks have met, and the others make the group for the messages now
        step_runner.message_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    began = time.monotonic()
    with symm_overlap.timeout(60), pytest.raises(dist.DistBackendError) as raised:
        runtime.step(x, target=target)
    assert time.monotonic() - began < SOON
    return str(raised.value)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_while_the_group_for_messages_is_made_is_named(victim: int) -> None:
    with Pool(3) as pool:
        outcomes = pool.submit((0, 1, 2), dies_before_the_first_message, victim).outcomes(60)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].failure is None, outcomes[rank].failure
        assert f"rank {victim} (pid" in outcomes[rank].value, outcomes[rank].value


def comes_late(me: Rank) -> None:
    runtime = runtime_of(me, "1F1B", 4, [Layer(stage) for stage in range(me.world)], loss=squared, transport="c10d")
    make = step_runner.message_group
    if me.rank == 1:
        step_runner.message_group = lambda *arguments: (time.sleep(1.5), make(*arguments))[1]  # type: ignore[assignment]
    x, target = batch(4)
    # The other rank has gone by the time the late one comes. gloo may find that out before the deadline.
    message = r"was not made within 0\.5 s, because not all ranks came" if me.rank == 0 else "was not made|rank 0"
    with symm_overlap.timeout(0.5), pytest.raises(dist.DistBackendError, match=message):
        runtime.step(x, target=target)


def test_a_rank_that_comes_late_ends_the_wait_at_the_deadline() -> None:
    with Pool(2) as pool:
        pool.run(2, comes_late)
