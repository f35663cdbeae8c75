"""A model may give any names to its modules, parameters and buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import VOCABULARY, WIDTH, tokens


class Named(nn.Module):
    """A model with the names of T5's embedding, and with those of the functions for stages."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.runs, self.what = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("has", torch.randn(WIDTH))
        self.place = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.shared(ids) * self.runs
        for layer in self.layers:
            x = layer(x)
        return self.place(x * self.what) + self.has


def test_no_name_of_a_model_is_taken() -> None:
    torch.manual_seed(0)
    model, batch = Named().double(), {"ids": tokens()}
    stages = Stages(model, batch, (1, 1))
    torch.testing.assert_close(stages(), model(**batch), rtol=0, atol=0)
    keys = [key for stage in stages.modules for key in stage.state_dict()]
    assert sorted(keys) == sorted(model.state_dict())
