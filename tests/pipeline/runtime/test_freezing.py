"""Parameters may be frozen between steps, and trained again. What was frozen in the first step stays so."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import symm_overlap
from tests.pipeline.runtime.models import Layer, assert_gradients, batch, gradients, reference, squared
from tests.pipeline.runtime.test_contract import TRANSPORTS, runtime_of
from tests.quick import one_in
from tests.ranks import Pool, Rank


class TwoValues(nn.Module):
    """Passes on the results of two layers, the first of which may be frozen alone."""

    def __init__(self, stage: int, last: bool) -> None:
        super().__init__()
        self.one, self.two, self.last = Layer(2 * stage), Layer(2 * stage + 1), last

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        one, two = self.one(x), self.two(x if y is None else y)
        return one * 2 - two if self.last else (one, two)


def model(count: int) -> list[TwoValues]:
    return [TwoValues(stage, stage == count - 1) for stage in range(count)]


def freeze(modules: list[TwoValues], stages: set[int], one_only: bool) -> None:
    for stage, module in enumerate(modules):
        module.requires_grad_(stage not in stages)
        if one_only:
            module.two.requires_grad_(True)


def same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Gradients must be equal, and missing where those of the model are."""
    assert [name for name, each in found.items() if each is None] == [
        name for name, each in expected.items() if each is None
    ]
    assert_gradients(*({name: each for name, each in some.items() if each is not None} for some in (found, expected)))


def frozen_between_steps(me: Rank, name: str, transport: str) -> None:
    count = me.world * (2 if name == "ZBV" else 1)
    whole, mine = model(count), model(count)
    runtime = runtime_of(me, name, 4, list(mine), loss=squared, transport=transport)
    everything = set(range(count))
    states: list[set[int]] = [set(), set(), {0}, {0, 1}, everything - {count - 1}, {1}, set()]
    for step, stages in enumerate(states):
        for one_only in (False, True) if step else (False,):
            x, target = batch(4, step)
            for modules in (whole, mine):
                freeze(modules, stages, one_only)
                for module in modules:
                    module.zero_grad()
            wanted = reference(whole, x, target, 4)[2]
            runtime.step(x, target=target)
            for stage in runtime.schedule.stages_of_ranks[me.rank]:
                same(gradients(mine[stage]), wanted[stage])


@pytest.mark.parametrize("transport", one_in(2, TRANSPORTS))
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZBV"])
def test_stages_may_be_frozen_between_steps(ranks: Pool, name: str, transport: str) -> None:
    ranks.run(3, frozen_between_steps, name, transport)


def trained_after_the_first_step(me: Rank, lane: int) -> None:
    with symm_overlap.lane(lane), symm_overlap.timeout(20):
        mine = [Layer(0).requires_grad_(False), Layer(1)]
        runtime = runtime_of(me, "1F1B", 4, list(mine), loss=squared, transport="symmetric")
        x, target = batch(4)
        for _ in range(2):
            runtime.step(x, target=target)
        mine[0].requires_grad_(True)
        message = "no value may require a gradient that required none" if me.rank == 0 else "rank 0"
        with pytest.raises(ValueError if me.rank == 0 else dist.DistBackendError, match=message):
            runtime.step(x, target=target)


def test_a_stage_that_was_frozen_in_the_first_step_is_refused_later(ranks: Pool, fresh_lane: Any) -> None:
    ranks.run(2, trained_after_the_first_step, fresh_lane())
