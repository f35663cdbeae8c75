"""Entries of the batch choose what a model calls and returns: microbatches may differ, and ranks fail together."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from symm_overlap.pipeline.model import PipelineModel
from tests.pipeline.model.models import WIDTH, reals
from tests.ranks import Pool, Rank


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: bool = False) -> dict[str, Any]:
        rows = x.shape[0]
        for layer in self.layers:
            x = layer(x)
        return {"x": self.extra(x) if more else x, "rows": rows, "names": ("a", "b")}


def made(me: Rank) -> PipelineModel:
    return PipelineModel(
        Choosing().double(), num_microbatches=4, loss=lambda y, target: y["x"].mean() - target.mean(), group=me.group
    )


def refused(me: Rank) -> None:
    pipe, batch = made(me), {"x": reals(8, WIDTH), "target": reals(8, WIDTH)}
    with pytest.warns(UserWarning, match="2 parameters were not used with the first batch"):
        pipe.run_train(**batch)
    with pytest.raises(ValueError, match="calls extra in a stage that does not have it: with the first batch, nothing"):
        pipe.run_train(**batch, more=True)
    pipe.run_train(**batch)


def test_a_module_that_one_stage_does_not_have_is_an_error_on_every_rank(ranks: Pool) -> None:
    ranks.run(2, refused)


def evaluated(me: Rank) -> Any:
    return made(me).run_eval(x=reals(10, WIDTH), more=True)


def test_constants_that_differ_between_microbatches_are_returned_as_a_list(ranks: Pool) -> None:
    _, found = ranks.run(2, evaluated)
    assert found["x"].shape == (10, WIDTH)
    assert (found["rows"], found["names"]) == ([3, 3, 2, 2], ("a", "b"))
