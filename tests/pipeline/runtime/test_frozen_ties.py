"""Copies of a tied parameter are frozen together. If only some are, the sum of gradients would lack what these add."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import nn

from tests.pipeline.runtime.models import Layer, assert_gradients, batch, gradients, reference, squared
from tests.pipeline.runtime.test_contract import TRANSPORTS, runtime_of
from tests.ranks import Pool, Rank

NAME = "linear.weight"
MESSAGE = (
    rf"only some of the copies of a tied parameter require a gradient \({NAME} of stage 0, {NAME} of stage 1\): they "
    "are one parameter, so freeze all of them or none"
)


def frozen(me: Rank, schedule: str, transport: str | None, copies: Sequence[int]) -> None:
    """Freeze one of two copies, or both, in the second of three steps."""
    whole, mine = ([Layer(stage) for stage in range(2)] for _ in range(2))
    whole[1].linear.weight = whole[0].linear.weight
    runtime = runtime_of(me, schedule, 4, mine, loss=squared, tied=[[(0, NAME), (1, NAME)]], transport=transport)
    own = [mine[stage] for stage in runtime.schedule.stages_of_ranks[me.rank]]
    for step in range(3):
        for stage in (0, 1):
            weight = mine[stage].linear.weight
            weight.requires_grad_(step != 1 or stage not in copies)
            weight.grad = None
        whole[0].linear.weight.requires_grad_(step != 1 or len(copies) != 2)
        nn.ModuleList([*whole, *own]).zero_grad()
        x, target = batch(4, step)
        if step == 1 and len(copies) == 1:
            with pytest.raises(ValueError, match=MESSAGE):
                runtime.step(x, target=target)
            assert all(mine[stage].linear.weight.grad is None for stage in (0, 1))
            if runtime.schedule.ranks > 1 and transport == "symmetric":
                return  # an error breaks the lane
            continue
        wanted = reference(whole, x, target, 4)[2]
        runtime.step(x, target=target)
        for stage in runtime.schedule.stages_of_ranks[me.rank]:
            found, expected = gradients(mine[stage]), wanted[stage]
            if step == 1 and len(copies) == 2:
                assert found.pop(NAME) is expected.pop(NAME) is None
            assert_gradients(found, expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("copies", [(0,), (1,), (0, 1)])
def test_copies_on_two_ranks_are_frozen_together(fresh_ranks, transport: str, copies: Sequence[int]) -> None:
    fresh_ranks(2).run(2, frozen, "1F1B", transport, copies)


@pytest.mark.parametrize("copies", [(0,), (0, 1)])
def test_copies_on_one_rank_are_frozen_together(ranks: Pool, copies: Sequence[int]) -> None:
    ranks.run(1, frozen, "Interleaved1F1B", None, copies)
