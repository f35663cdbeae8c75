"""Buffers change as in the whole model, wherever that happens. If several stages would need them, that is an error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from symm_overlap.pipeline.model import TraceError
from symm_overlap.pipeline.model.cut import cut
from tests.pipeline.model.in_one_process import Stages, traced
from tests.pipeline.model.models import WIDTH, reals


class Monitor(nn.Module):
    """A module that notes the largest value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().max()))
        return x


class Learning(nn.Module):
    """A model that changes a buffer or several, in the way that ``how`` names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.monitor = nn.BatchNorm1d(WIDTH), Monitor()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.instance = nn.InstanceNorm1d(WIDTH, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        given = x
        if self.how == "free norm":
            given = F.batch_norm(x, self.mean, self.variance, training=self.training)
        elif self.how == "free module":
            given = self.instance(x[:, :, None] * torch.arange(1.0, 5.0, dtype=x.dtype))[:, :, 0]
        for index, layer in enumerate(self.layers):
            x = layer(x) + given
            if index == 1:
                x = x - self.mean if self.how != "free norm" else x
                self.change(x)
            elif self.how == "norm twice":
                x = self.norm(x)
            elif self.how == "monitor elsewhere" and index == 2:
                x = x * self.monitor.largest
        return x

    def change(self, x: Tensor) -> None:
        if self.how == "without gradients":
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0))
        elif self.how == "nested":
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                self.mean[1:].copy_(x.mean(0)[1:])
        elif self.how.startswith("monitor"):
            self.monitor(x)


@pytest.mark.parametrize("how", ["without gradients", "nested", "monitor", "free norm", "free module"])
def test_buffers_change_as_in_the_whole_model(how: str) -> None:
    torch.manual_seed(0)
    model, batch = Learning(how).double(), {"x": reals(4, WIDTH)}
    whole = copy.deepcopy(model)
    for training in (True, False):
        stages = Stages(model.train(training), batch, (1, 1, 1))
        whole.train(training)
        for _ in range(2):
            torch.testing.assert_close(stages(), whole(**batch), rtol=0, atol=0)
    expected = dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0, msg=name)
    places = [[name for name in part.buffers if not name.startswith("layers")] for part in stages.parts]
    assert sum(map(len, places)) == len({name for each in places for name in each}), "a buffer has one copy"


@pytest.mark.parametrize(("how", "name"), [("norm twice", "norm.num"), ("monitor elsewhere", "monitor.largest")])
def test_a_buffer_that_is_changed_and_used_by_several_stages_is_refused(how: str, name: str) -> None:
    found, _, _ = traced(Learning(how).double(), {"x": reals(4, WIDTH)})
    with pytest.raises(TraceError, match=rf"changes the buffer {name}.*and several stages use it"):
        cut(found, (1, 1, 1))
    cut(found, (3,))
