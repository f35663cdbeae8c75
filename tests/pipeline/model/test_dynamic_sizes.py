"""Layers may compute with tensors whose sizes depend on values, such as the rows of an expert, but not return them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from symm_overlap.pipeline.model import PipelineModel, TraceError
from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import WIDTH, reals
from tests.pipeline.model.reference import same_gradients, whole_step
from tests.ranks import Pool, Rank


class Experts(nn.Module):
    """Each row is multiplied by the expert that it chooses."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        chosen, result = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.how == "where":
                (rows,) = torch.where(chosen == number)
                result[rows] += expert(x[rows])
            elif self.how == "mask":
                result[chosen == number] = expert(x[chosen == number])
            else:
                result = result.index_add(0, rows := (chosen == number).nonzero()[:, 0], expert(x[rows]))
        return x + result


def model_of(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Experts(how), Experts(how), Experts(how)).double()


@pytest.mark.parametrize("how", ["where", "mask", "nonzero"])
def test_rows_that_values_choose_inside_of_a_layer(how: str) -> None:
    model, batch = model_of(how), {"input": reals(8, WIDTH)}
    stages = Stages(copy.deepcopy(model), batch, (1, 2))
    torch.testing.assert_close(stages(), model(batch["input"]), rtol=0, atol=0)


def trained(me: Rank) -> None:
    model, batch = model_of("where"), {"input": reals(8, WIDTH), "target": reals(8, WIDTH, seed=1)}
    options = {"loss": mse_loss, "layer_names": "*"}
    pipe = PipelineModel(copy.deepcopy(model), num_microbatches=2, group=me.group, **options)
    with pytest.warns(UserWarning, match="FLOPs"):
        pipe.build(**batch)
    whole_step(model, batch, options, 2)
    pipe.run_train(**batch)
    same_gradients(pipe, model)


def test_a_model_with_such_layers_is_trained(ranks: Pool) -> None:
    ranks.run(2, trained)


class Selected(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


def test_rows_that_values_choose_cannot_leave_a_layer() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Selected(), nn.Linear(WIDTH, WIDTH)).double()
    with pytest.raises(TraceError, match=r"1 \(Selected\) returns a tensor whose size depends on the values"):
        Stages(model, {"input": reals(8, WIDTH)}, (1, 2))
