"""A value that the tracer cannot follow is an error, and never a constant of the first batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import TraceError
from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import WIDTH, reals


class Expert(nn.Linear):
    """A layer that leaves a part of the loss behind as an attribute."""

    aux: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        return torch.tanh(y)


class Experts(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert(WIDTH, WIDTH) for _ in range(2))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.how == "attribute":
            return x + sum(layer.aux for layer in self.layers)
        if self.how == "without gradients":
            with torch.no_grad():
                scale = self.layers[0].aux * 2
            return x * scale
        if self.how == "data":
            return x + (torch.round(x) - x).data
        return x + (torch.round(x) - x).detach()


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("attribute", r": File .*test_trace_values\.py.*: return x \+ sum"),
        ("without gradients", r"results of its modules"),
        ("data", r": File .*test_trace_values\.py.*: return x \+ \(torch\.round\(x\) - x\)\.data"),
    ],
)
def test_a_tensor_past_the_results_of_modules_is_refused_with_its_line(how: str, line: str) -> None:
    with pytest.raises(TraceError, match=r"does not pass through the .*" + line):
        Stages(Experts(how).double(), {"x": reals(2, WIDTH)}, (1, 1))


def test_the_ways_out_that_the_message_names_are_traced() -> None:
    torch.manual_seed(0)
    model, batch = Experts("detach").double(), {"x": reals(2, WIDTH)}
    torch.testing.assert_close(Stages(model, batch, (1, 1))(), model(**batch), rtol=0, atol=0)
