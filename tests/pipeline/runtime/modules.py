"""Modules for tests of split backward passes, each with the share of its backward FLOPs that the weight part does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.nn.blocks import MLP, WIDTH, Attention, Block
from tests.pipeline.runtime.random_modules import Product, ProductInParts


class Of(nn.Module):
    """A module that calls a function with its parts and its arguments."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for index, part in enumerate(parts):
            setattr(self, f"part{index}", part)
        self.count = len(parts)

    def forward(self, *args: Tensor) -> Any:
        return self.function(*(getattr(self, f"part{index}") for index in range(self.count)), *args)


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias)


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH))


def vector() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def recomputed(module: nn.Module, reentrant: bool) -> nn.Module:
    return Of(lambda inner, x: checkpoint(inner, x, use_reentrant=reentrant), module)


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell = cell(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


def compiled(module: nn.Module) -> nn.Module:
    module.compile(backend="aot_eager")
    return module


@dataclass(frozen=True)
class Case:
    """A module and what the tests expect of it.

    Attributes:
        make: creates the module, for one input of shape (4, 3, WIDTH) for each entry of ``inputs``.
        share: the share of the matmul FLOPs of the backward pass that the weight part does. None: it is not checked.
        inputs: for each input, whether it requires a gradient.
        gradients: the outputs that get a gradient. None: all that require one.
    """

    make: Callable[[], nn.Module]
    share: float | None = 0.5
    inputs: tuple[bool, ...] = (True,)
    gradients: tuple[int, ...] | None = None


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3), linear())


def shared_convolution() -> nn.Module:
    return Of(lambda conv, x: conv(conv(x).tanh()), nn.Conv1d(3, 3, 3, padding=1))


def cast_once() -> nn.Module:
    def use_twice(weight: Tensor, x: Tensor) -> Tensor:
        cast = weight.float().double()
        return torch.tanh(x @ cast.t()) @ cast.t()

    return Of(use_twice, matrix())


def two_ways() -> nn.Module:
    """One op uses a parameter both directly and through another node."""
    return Of(lambda w, x: torch.addmm(w.sin(), x[0, :1].expand(WIDTH, -1), w), matrix())


def in_a_product() -> nn.Module:
    """The gradient of the vector ``v`` cannot be left to the weight part. The gradient of ``w`` comes from the same
    product, so it cannot be left either. The same then holds for ``u``, which is in a product with ``w``."""
    return Of(lambda w, u, v, x: torch.tanh(x[0] @ (w * v)) @ (w * u) * v + v, matrix(), matrix(), vector())


def chunked() -> nn.Module:
    both = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
    return Of(lambda w, x: F.linear(F.linear(x, w[:WIDTH]).tanh(), w[WIDTH:]), both)


def branches() -> nn.Module:
    """Two values that depend on no input: one is added to the result, and one is an output."""
    return Of(lambda m, w, v, x: (m(x) * v + (w @ v).exp(), w @ v), linear(), matrix(), vector())


def recomputed_branch() -> nn.Module:
    """If the weight part ran this branch, it would recompute what was saved for ``exp``."""

    def branch(weight: Tensor, x: Tensor) -> Tensor:
        return x.tanh() + (weight @ weight.t()).exp().sum(0)

    return Of(lambda weight, x: checkpoint(branch, weight, x, use_reentrant=False), matrix())


def changed_in_place() -> nn.Module:
    def change(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        hidden = first(x.relu_()).sigmoid_().clone().add_(1)
        hidden[..., 0].mul_(2)
        return second(hidden)

    return Of(change, linear(), linear())


NONE, BOTH = (False,), (True, True)
CASES = {
    "linear": Case(linear),
    "linear without bias": Case(lambda: linear(False)),
    "mlp": Case(MLP),
    "attention": Case(Attention, None),
    "multihead attention": Case(lambda: Of(lambda m, x: m(x, x, x)[0], nn.MultiheadAttention(WIDTH, 2)), None),
    "transformer block": Case(Block, None),
    "convolution": Case(lambda: nn.Conv1d(3, 3, 3, padding=1), 0.5),
    "batch norm": Case(batch_norm),
    "embedding": Case(lambda: Of(lambda e, m, x: m(x + e.weight[:3]), nn.Embedding(5, WIDTH), MLP())),
    "lstm": Case(lambda: Recurrent(nn.LSTM), None),
    "gru": Case(lambda: Recurrent(nn.GRU), None),
    "weight norm": Case(lambda: parametrizations.weight_norm(linear()), None),
    "no parameters": Case(nn.GELU, None),
    "frozen": Case(lambda: frozen(MLP()), 0.0),
    "partly frozen": Case(lambda: nn.Sequential(frozen(linear()), linear()), 1 / 3),
    "first stage": Case(MLP, 1.0, NONE),
    "first stage, partly frozen": Case(lambda: nn.Sequential(frozen(linear()), linear()), 1.0, NONE),
    "one layer twice": Case(lambda: Of(lambda m, x: m(m(x).tanh()), linear())),
    "one matrix twice": Case(lambda: Of(lambda w, x: torch.tanh(x[0] @ w) @ w, matrix()), 0.0),
    "one matrix in two branches": Case(lambda: Of(lambda w, x: (x[0] @ w) * (x[1] @ w), matrix()), 0.0),
    "one convolution twice": Case(shared_convolution, 0.0),
    "one cast twice": Case(cast_once),
    "one matrix in two ways": Case(two_ways, None),
    "one vector by itself and in a product": Case(in_a_product, 0.0),
    "one matrix in chunks": Case(chunked),
    "branches of parameters": Case(branches, None),
    "several outputs": Case(lambda: Of(lambda a, b, x: (a(x), b(a(x).relu_()), x), linear(), linear())),
    "one output used": Case(lambda: Of(lambda a, b, x: (a(x), b(x)), linear(), linear()), gradients=(1,)),
    "no output used": Case(lambda: Of(lambda a, b, x: (a(x), b(x)), linear(), linear()), None, gradients=()),
    "integers among the outputs": Case(lambda: Of(lambda m, x: (x.argmax(-1), m(x), x.detach()), linear())),
    "relayed": Case(lambda: Of(lambda m, x, y: (m(x) + y, y, y), linear()), 0.5, BOTH),
    "nothing but relayed": Case(lambda: Of(lambda x, y: (y, x)), None, (True, False)),
    "an unused input": Case(lambda: Of(lambda m, x, y: m(x), linear()), 0.5, BOTH),
    "an input without gradient": Case(
        lambda: Of(lambda a, b, x, y: a(x) + b(y), linear(), linear()), 2 / 3, (True, False)
    ),
    "changed in place": Case(changed_in_place),
    "recomputed": Case(lambda: recomputed(MLP(), False), 0.0),
    "recomputed, with a branch of parameters": Case(recomputed_branch, None),
    "recomputed, then a layer": Case(lambda: nn.Sequential(recomputed(MLP(), False), linear()), None),
    "recomputed by a nested pass": Case(lambda: nn.Sequential(recomputed(MLP(), True), linear()), 0.0),
    "a function of one piece": Case(lambda: Of(lambda w, x: Product.apply(x.flatten(0, 1), w, 0.5), matrix()), 0.0),
    "a function in parts": Case(lambda: Of(lambda w, x: ProductInParts.apply(0.5, x.flatten(0, 1), w), matrix())),
    "compiled": Case(lambda: compiled(MLP()), 0.0),
    "compiled, then a layer": Case(lambda: nn.Sequential(compiled(MLP()), linear()), 0.0),
}
