"""By torch's runtime and with a split backward, parameters whose gradients are one tensor get their own gradients."""

import pytest
import torch
from torch import nn

from tests.pipeline.test_torch_schedule import WIDTH, batch
from tests.pipeline.test_torch_schedule_apart import trains


class Added(nn.Module):
    """Adds two parameters of the shape of its input, which have the same gradient.

    With ``expanded``, it has another parameter, whose gradient is an expanded tensor.
    """

    def __init__(self, stage, rows, expanded):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stage)
            self.linear = nn.Linear(WIDTH, WIDTH).double()
            self.one, self.other = (nn.Parameter(torch.randn(rows, WIDTH, dtype=torch.float64)) for _ in range(2))
            self.factors = nn.Parameter(torch.randn(3, dtype=torch.float64)) if expanded else None

    def forward(self, x):
        factor = 1 if self.factors is None else self.factors.sum()
        return torch.tanh(self.linear(x)) * factor + self.one + self.other


def added(stages, expanded):
    """Return the modules of all stages, for the microbatches of `trains`."""
    return [Added(stage, len(batch(1)[0]), expanded) for stage in range(stages)]


@pytest.mark.parametrize("name", ["ZB-H1", "ZBV"])
@pytest.mark.parametrize("expanded", [False, True])
def test_parameters_whose_gradients_are_one_tensor(ranks, name, expanded):
    ranks.run(2, trains, name, added, expanded)
