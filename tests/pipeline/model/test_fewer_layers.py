"""Models that call fewer layers in evaluation than in training, or for some batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import PipelineModel
from tests.pipeline.model.models import WIDTH, mean_square, reals
from tests.pipeline.model.reference import EXACT, same_gradients, whole_step
from tests.quick import one_in
from tests.ranks import Pool, Rank


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class Skipping(nn.Module):
    """In evaluation it calls some of its layers, or with None the first three, and in training also those that predict
    more of the text, each followed by the same head."""

    def __init__(self, called: Sequence[int] | None) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(6))
        self.scale = nn.Parameter(torch.linspace(1.0, 1.5, WIDTH))
        self.norm, self.head, self.called = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), called
        self.bounded = nn.Tanh()  # any stage may call it

    def forward(self, x: Tensor) -> Tensor:
        x, heads = self.first(x) * self.scale, []
        if not self.training:
            x = self.bounded(x)
        for index, layer in enumerate(self.layers):
            if self.training or index in (range(3) if self.called is None else self.called):
                x = layer(x)
                if self.called is None and index > 1:
                    heads.append(self.head(self.norm(x)))
        return self.bounded(torch.stack(heads).sum(0) if heads else self.head(self.norm(x * self.scale)))


def made(me: Rank, called: Sequence[int] | None, schedule: str) -> tuple[PipelineModel, nn.Module]:
    torch.manual_seed(0)
    model = Skipping(called).double()
    pipe = PipelineModel(
        copy.deepcopy(model), "Layer", num_microbatches=2, schedule=schedule, loss=mean_square, group=me.group
    )
    return pipe, model


def train_and_evaluate(me: Rank, called: Sequence[int] | None, schedule: str) -> None:
    pipe, whole = made(me, called, schedule)
    batch = {"x": reals(4, WIDTH), "target": reals(4, WIDTH, seed=1)}
    for mode in (True, False, True):
        pipe.train(mode)
        whole.train(mode)
        loss, expected = pipe.run_train(**batch), whole_step(whole, batch, {"loss": mean_square}, 2)
        if loss is not None:
            torch.testing.assert_close(loss, expected, **EXACT)
        same_gradients(pipe, whole)
        result = pipe.run_eval(x=batch["x"])
        if result is not None:
            torch.testing.assert_close(result, whole(batch["x"]).detach(), **EXACT)


@pytest.mark.parametrize(
    ("called", "schedule"),
    one_in(2, [(None, "ZBV"), ([0], "1F1B"), ([5], "1F1B"), ([0, 1], "ZBV"), ([1, 3, 4], "ZBV")]),
)
def test_some_layers_are_called_in_training_only(ranks: Pool, called: Sequence[int] | None, schedule: str) -> None:
    ranks.run(2, train_and_evaluate, called, schedule)


def built_for_fewer(me: Rank) -> None:
    pipe, _ = made(me, [0, 2], "1F1B")
    batch = {"x": reals(4, WIDTH), "target": reals(4, WIDTH, seed=1)}
    pipe.eval().build(**batch)
    with pytest.raises(ValueError, match=r"calls layers\.\d in a stage that does not have it.* in the mode, train\(\)"):
        pipe.train().run_train(**batch)
    pipe.eval()
    pipe.run_train(**batch)


def test_an_error_says_to_build_for_all_layers(ranks: Pool) -> None:
    ranks.run(2, built_for_fewer)
