"""``torch.vmap`` in the code between layers runs in the stages as in the model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import TraceError
from tests.pipeline.model.in_one_process import Stages


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * scale


class Model(nn.Module):
    def __init__(self, compute: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.compute(self, x)
        for layer in self.layers[:2]:
            x = layer(x, scale)
        scale = scale + self.compute(self, x)
        for layer in self.layers[2:]:
            x = layer(x, scale)
        return x


def mask(model: Model, x: Tensor) -> Tensor:
    """As Hugging Face computes masks: a function of indices, mapped over each of them in turn."""
    inner = torch.vmap(lambda row, column: (row >= column) & x.new_ones([], dtype=torch.bool), in_dims=(None, 0))
    allowed = torch.vmap(inner, in_dims=(0, None))(torch.arange(len(x)), torch.arange(8))
    return 1.0 + allowed


def trained(model: Model, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: (row @ model.weight, row.sum()), out_dims=(0, 0))(x)[0]


def without_gradients(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.vmap(lambda row: row @ model.weight)(x) * x.mean()


def changed_inside(model: Model, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.clone().add_(1.0))(x)


@pytest.mark.parametrize("compute", [mask, trained, without_gradients, changed_inside])
def test_stages_compute_what_the_model_computes(compute: Callable[[Model, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Model(compute).double()
    x = torch.randn(6, 8).double().requires_grad_()
    whole = copy.deepcopy(model)
    stages = Stages(model, {"x": x}, (1, 3), layer_names="layers.*")
    for _ in range(2):
        found, expected = stages(), whole(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        found.square().sum().backward()
        expected.square().sum().backward()
    for (name, one), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14, msg=name)
    sent = 2 if compute in (trained, without_gradients) else 1
    assert len(stages.sent[0]) == sent, "what depends on the batch alone is computed again, and not sent"


def changes_a_buffer(model: Model, x: Tensor) -> Tensor:
    torch.vmap(lambda count: count.add_(1.0))(model.count)
    return x * model.count


def test_a_buffer_that_vmap_changes_in_two_stages_is_refused() -> None:
    batch = {"x": torch.randn(6, 8)}
    with pytest.raises(TraceError, match="in place"):
        Stages(Model(changes_a_buffer), batch, (1, 3), layer_names="layers.*")


def test_an_error_in_vmap_leaves_no_level_behind() -> None:
    model, batch = Model(trained), {"x": torch.randn(6, 8)}
    stages = Stages(model, batch, (1, 3), layer_names="layers.*")
    model.weight.data = torch.randn(7, 7)
    with pytest.raises(RuntimeError):
        stages()
    model.weight.data = torch.randn(8, 8)
    torch.testing.assert_close(stages(), model(batch["x"]))
