"""What is traced depends on the modes that the model sets itself, and not on those in which it happens to be traced."""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor
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


class Cast(nn.Module):
    """A model that looks at the dtype that a module returns, and computes a part without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = self.layers[1](x * 2 if x.dtype == torch.bfloat16 else x)
        with torch.autocast("cpu", enabled=False):
            y = self.extra(x.float()) @ x.t().float()
        return x + y.mean()


@pytest.mark.parametrize("enabled", [True, False])
def test_modules_have_the_dtypes_of_autocast_while_they_are_traced(enabled: bool) -> None:
    torch.manual_seed(0)
    model, batch = Cast(), {"x": reals(2, WIDTH).float()}
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        stages = Stages(model, batch, (1, 1))
        torch.testing.assert_close(stages(), model(**batch), rtol=0, atol=0)


class Slow(Rounding):
    """A model that lets other threads run between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1)
        return super().forward(x)


def test_models_may_be_traced_in_several_threads() -> None:
    torch.manual_seed(0)
    models, batch = [Slow().double() for _ in range(4)], {"x": reals(2, WIDTH)}
    with ThreadPoolExecutor(4) as threads:
        stages = list(threads.map(lambda model: Stages(model, batch, (1, 1)), models))
    for model, found in zip(models, stages, strict=True):
        torch.testing.assert_close(found(), model(**batch), rtol=0, atol=0)
    assert "requires_grad" not in vars(Tensor), "what a trace replaces is back"
