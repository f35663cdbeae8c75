"""Functions that a model has stored may use its modules and parameters; whole modules may use only what they have."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from symm_overlap.pipeline.model import TraceError
from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import WIDTH, reals

_elsewhere: list[nn.Parameter] = []


class Closures(nn.Module):
    """Layers between a first one and a head. ``store`` stores a function on the model, for example as the head."""

    def __init__(self, store: Callable[[Closures], object]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.head: Any = None
        store(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        head = next(iter(self.head.values())) if isinstance(self.head, dict) else self.head
        return head[0](x) if isinstance(head, (list, tuple)) else head(x)


def a_weight(model: Closures) -> None:
    model.head = lambda x: x @ model.first.weight.t()


def the_weight_itself(model: Closures) -> None:
    weight = model.first.weight
    model.head = lambda x: x @ weight.t()


def a_module(model: Closures) -> None:
    model.head = lambda x: model.norm(x) @ model.first.weight


def a_default(model: Closures) -> None:
    def head(x: Tensor, weight: Tensor = model.first.weight, *, norm: nn.Module = model.norm) -> Tensor:
        return norm(x @ weight)

    model.head = head


def another_function(model: Closures) -> None:
    def inner(x: Tensor, times: int) -> Tensor:
        return x if times == 0 else inner(model.norm(x), times - 1)

    model.head = lambda x: inner(x, 2)


def in_containers(model: Closures) -> None:
    model.head = {"head": [partial(lambda scale, x: scale * model.norm(x), 2)]}


def in_a_tuple(model: Closures) -> None:
    model.head = (lambda x: model.norm(x),)


def a_method(model: Closures) -> None:
    model.head = MethodType(lambda self, x: self.norm(x) @ model.first.weight, model)


def a_hook(model: Closures) -> None:
    model.head = nn.Identity()
    model.register_forward_hook(lambda module, args, output: output * model.norm.weight)


def a_forward_of_its_own(model: Closures) -> None:
    model.head = model.norm
    for layer in model.layers:
        layer.forward = partial(
            lambda weight, bias, own, x: F.linear(x, weight, bias + own.bias), *layer.parameters(), layer
        )


def a_frozen_one(model: Closures) -> None:
    model.head = model.norm
    weight = model.first.weight.requires_grad_(False)
    model.norm.register_forward_hook(lambda module, args, output: output * weight.mean())


def a_new_one(model: Closures) -> None:
    model.head = model.norm
    model.norm.register_forward_hook(lambda module, args, output: output * nn.Parameter(torch.full((), 2.0)))


GOOD = [
    *(a_weight, the_weight_itself, a_module, a_default, another_function, in_containers, in_a_tuple, a_method, a_hook),
    *(a_forward_of_its_own, a_frozen_one, a_new_one),
]


@pytest.mark.parametrize("store", GOOD, ids=lambda store: store.__name__)
def test_stages_use_the_parameters_to_which_stored_functions_refer(store: Callable[[Closures], object]) -> None:
    torch.manual_seed(0)
    model = Closures(store)
    stages = Stages(model, {"x": reals(2, WIDTH)}, (1, 1))
    found, expected = stages(), model(reals(2, WIDTH))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    has = [dict(stage.named_parameters(remove_duplicate=False)) for stage in stages.modules]
    for name, parameter in model.named_parameters():
        for stage in has:
            if name in stage:  # the stage has it under its name, so its gradient is this one
                assert stage[name] is parameter
    torch.autograd.backward([found.square().sum()])
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert gradients[name] is None if parameter.grad is None else torch.equal(gradients[name], parameter.grad), name
        assert parameter.grad is None or any(name in stage for stage in has), name


def test_each_stage_has_the_parameters_of_its_functions() -> None:
    stages = Stages(Closures(a_weight), {"x": reals(2, WIDTH)}, (1, 1))
    assert all("first.weight" in dict(stage.named_parameters()) for stage in stages.modules)


def a_hook_of_a_layer(model: Closures) -> None:
    model.head = model.norm
    model.layers[0].register_forward_hook(lambda module, args, output: output * model.first.weight.mean())


def a_layer(model: Closures) -> None:
    model.head = model.norm
    layer = model.layers[1]
    layer.forward = lambda x: F.linear(x, layer.weight, model.first.bias)  # type: ignore[method-assign]


def a_global_one(model: Closures) -> None:
    _elsewhere[:] = [model.first.weight]
    model.head = lambda x: x @ _elsewhere[0]


def a_global_one_in_a_layer(model: Closures) -> None:
    model.head = model.norm
    _elsewhere[:] = [model.first.weight]
    model.layers[0].register_forward_hook(lambda module, args, output: output @ _elsewhere[0])


BAD = {
    a_hook_of_a_layer: "layers.0 (Linear) uses the parameter first.weight, which it does not have",
    a_layer: "layers.1 (Linear) uses the parameter first.bias, which it does not have",
    a_global_one: f"the model uses a parameter of shape ({WIDTH}, {WIDTH}) that belongs to none of its modules",
    a_global_one_in_a_layer: f"layers.0 (Linear) uses the parameter of shape ({WIDTH}, {WIDTH}), which it does not",
}


@pytest.mark.parametrize("store", BAD, ids=lambda store: store.__name__)
def test_a_parameter_that_a_stage_would_not_train_is_refused(store: Callable[[Closures], object]) -> None:
    with pytest.raises(TraceError, match=re.escape(BAD[store])):
        Stages(Closures(store), {"x": reals(2, WIDTH)}, (1, 1))
    _elsewhere.clear()
