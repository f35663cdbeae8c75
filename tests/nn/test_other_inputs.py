"""Linear layers that are called with another tensor than the module's gathered input, and inputs of one dimension: the
results are those of torch's own styles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard, parallel
from torch.distributed.tensor.parallel import parallelize_module

import symm_overlap.nn
from tests.nn.reference import mesh_of
from tests.ranks import Pool, Rank
from tests.transforms import comparing


class OtherWidth(nn.Module):
    """One layer gets the input, and the other one a wider tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) * self.b(torch.cat([x, x.sin()], -1))
        return y


class Tokens(nn.Module):
    """The input is token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.a = nn.Embedding(32, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(self.embedding(x.long() % 32))
        return y


class OtherDtype(nn.Module):
    """The module converts its input to the dtype of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x.double())
        return y


class Flattening(nn.Module):
    """The layer's features are two dimensions of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x.unflatten(0, (-1, 2)).flatten(1))
        return y


MODULES: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    OtherWidth: lambda x: x,
    Tokens: lambda x: (x * 10).long(),
    OtherDtype: lambda x: x,
    Flattening: lambda x: x,
}


def computed(styles: Any, me: Rank, module: nn.Module, x: Tensor, input: Placement, compile: bool) -> list[Tensor]:
    """Return the module's output and the gradients of its input and of layer ``a``, with the styles of a package."""
    torch._dynamo.reset()
    prepared = styles.PrepareModuleInput(input_layouts=input, desired_input_layouts=Replicate(), use_local_output=True)
    plan = {"": prepared, "a": styles.ColwiseParallel(), "b": styles.ColwiseParallel()}
    if not hasattr(module, "b"):
        del plan["b"]
    parallelize_module(module, mesh_of(me), plan)
    y = (torch.compile(module, backend="aot_eager") if compile else module)(x)
    y.double().square().sum().backward()
    weight: Any = module.a.weight
    return [y.detach(), weight.grad.full_tensor(), *([] if x.grad is None else [x.grad])]


def as_with_torch(me: Rank, module: type[nn.Module], input: Placement, compile: bool) -> None:
    found = []
    for styles in (symm_overlap.nn, parallel):
        torch.manual_seed(0)
        whole = torch.randn(4 * me.world, 8)
        x = MODULES[module](whole.chunk(me.world)[me.rank] if isinstance(input, Shard) else whole).clone()
        if x.is_floating_point():
            x.requires_grad_()
        with comparing(False):
            found.append(computed(styles, me, module(), x, input, compile and styles is symm_overlap.nn))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "compile", [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("module", MODULES)
def test_a_layer_that_cannot_take_the_gathered_input_gets_no_product_of_it(
    ranks: Pool, module: type[nn.Module], compile: bool
) -> None:
    for input in (Shard(0), Replicate()):
        ranks.run(2, as_with_torch, module, input, compile, timeout=120)


def one_dimension(me: Rank, style: str, layouts: dict[str, Placement], bias: bool) -> None:
    found = []
    for styles in (symm_overlap.nn, parallel):
        torch.manual_seed(0)
        layer = parallelize_module(nn.Linear(8, 4, bias), mesh_of(me), getattr(styles, style)(**layouts))
        x = torch.randn(8).chunk(me.world)[me.rank].clone().requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(parameter.grad.full_tensor() for parameter in layer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("style", "layouts", "bias"),
    [
        ("ColwiseParallel", {"input_layouts": Shard(-1)}, False),
        ("ColwiseParallel", {"input_layouts": Shard(0)}, True),
        ("RowwiseParallel", {"output_layouts": Shard(-1)}, True),  # without a bias torch's style has no backward here
        ("RowwiseParallel", {"output_layouts": Replicate()}, True),
    ],
)
def test_an_input_may_have_one_dimension(ranks: Pool, style: str, layouts: dict[str, Placement], bias: bool) -> None:
    ranks.run(2, one_dimension, style, layouts, bias)
