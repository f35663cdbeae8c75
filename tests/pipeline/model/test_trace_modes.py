"""What is traced depends on the modes that the model sets itself, and not on those in which it happens to be traced."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import WIDTH, reals


class Rounding(nn.Module):
    """A model that rounds between its layers, and passes gradients on unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            rest = torch.round(x) - x
        return self.layers[1](x + rest)


@pytest.mark.parametrize("mode", [torch.no_grad(), torch.inference_mode()])
def test_a_graph_that_was_traced_in_an_evaluation_has_the_gradients_of_training(
    mode: AbstractContextManager[None],
) -> None:
    torch.manual_seed(0)
    model, batch = Rounding().double(), {"x": reals(2, WIDTH)}
    whole = copy.deepcopy(model)
    with mode:
        stages = Stages(model, batch, (1, 1))
    stages().sum().backward()
    whole(**batch).sum().backward()
    torch.testing.assert_close(model.layers[0].weight.grad, whole.layers[0].weight.grad, rtol=0, atol=0)
