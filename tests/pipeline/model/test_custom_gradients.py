"""Gradients of the model's own are right inside of modules. Between layers they would be lost, and are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from symm_overlap.pipeline.model import TraceError
from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import WIDTH, reals


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -3 * gradient


class Reversing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reverse.apply(x)


class Adversarial(nn.Module):
    """A model that reverses gradients between its layers: itself, in a module, by a hook, or not at all.

    Or it only looks at them.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.reverse = Reversing()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.how == "function":
            x = Reverse.apply(x)
        elif self.how == "module":
            x = self.reverse(x)
        elif self.how == "hook":
            x.register_hook(lambda gradient: -3 * gradient)
        elif self.how == "look":
            x = 2 * x if x.requires_grad else x
        elif self.how == "look at a parameter":
            x = 2 * x if self.layers[1].weight.requires_grad else x
        elif self.how == "without gradients":
            with torch.no_grad():
                x = x + Reverse.apply(x)
        return checkpoint(self.layers[1], x, use_reentrant=False)


@pytest.mark.parametrize(
    ("how", "what"),
    [("function", "applies Reverse, a t"), ("hook", "calls Tensor.register_"), ("look", "looks at Tensor.requires_g")],
)
def test_a_gradient_of_the_models_own_between_layers_is_refused(how: str, what: str) -> None:
    with pytest.raises(TraceError, match=rf"the model itself \(Adversarial\), .*\n.*\n  the model {what}"):
        Stages(Adversarial(how).double(), {"x": reals(2, WIDTH)}, (1, 1))
    assert Reverse.apply(torch.ones(2)).sum() == 2, "after the error, functions must work again"
    assert "requires_grad" not in vars(Tensor)


def test_apply_may_be_written_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is from torch 2.14 on."""
    in_c = next(vars(each)["apply"] for each in reversed(torch.autograd.Function.__mro__) if "apply" in vars(each))
    monkeypatch.setattr(torch.autograd.Function, "apply", in_c)
    test_a_gradient_of_the_models_own_between_layers_is_refused("function", "applies Reverse, a t")
    test_in_a_module_or_without_gradients_it_is_right("module")


@pytest.mark.parametrize("how", ["module", "without gradients", "look at a parameter"])
def test_in_a_module_or_without_gradients_it_is_right(how: str) -> None:
    torch.manual_seed(0)
    model, batch = Adversarial(how).double(), {"x": reals(2, WIDTH)}
    whole = copy.deepcopy(model)
    Stages(model, batch, (1, 1))().sum().backward()
    whole(**batch).sum().backward()
    for (name, one), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize("name", ["", "layers"])
def test_a_backward_hook_around_layers_is_refused(name: str) -> None:
    model, batch = Adversarial("module").double(), {"x": reals(2, WIDTH)}
    model.layers[0].register_full_backward_hook(lambda module, before, after: None)
    Stages(copy.deepcopy(model), batch, (1, 1))
    model.get_submodule(name).register_full_backward_pre_hook(lambda module, gradients: (2 * gradients[0],))
    with pytest.raises(TraceError, match=rf"^{name or 'the model itself'} \(\w+\) has a backward hook"):
        Stages(model, batch, (1, 1))
