"""Models that compute what they give to their layers in an order that tests choose, as if it were that of a set."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import PipelineModel
from tests.ranks import Rank

FACTORS = {"full": 1.0, "sliding": 2.0, "local": 5.0}
first = 0
"""With which kind this process begins."""


def kinds() -> Iterator[str]:
    names = [*FACTORS]
    return iter([*names[first:], *names[:first]])


class Angle(nn.Module):
    def forward(self, x: Tensor, kind: str) -> Tensor:
        return x.mean() + FACTORS[kind]


class Angles(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {kind: x.mean() + FACTORS[kind] for kind in kinds()}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, angle: Tensor | dict[str, Tensor]) -> Tensor:
        if isinstance(angle, dict):
            angle = angle["full"] - 2 * angle["sliding"] + 3 * angle["local"]
        return torch.tanh(self.linear(x)) * angle


Compute = Callable[["Model", Tensor], dict[str, Tensor]]


class Model(nn.Module):
    """Calls its layers in one order. What it gives to them is computed in the order of `kinds`."""

    def __init__(self, compute: Compute, *, together: bool = False) -> None:
        super().__init__()
        self.compute, self.together = compute, together
        self.embed = nn.Linear(8, 8)
        self.angle, self.angles, self.drop = Angle(), Angles(), nn.Dropout(0.5)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        for kind, factor in FACTORS.items():
            self.register_buffer(kind, torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        angles = self.compute(self, x)
        for number, layer in enumerate(self.layers):
            x = layer(x, angles if self.together else angles[[*FACTORS][number % 3]])
        return x


def without_gradients(model: Model, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {kind: model.angle(x, kind) * x.std() for kind in kinds()}


COMPUTE: dict[str, Compute] = {
    "modules": lambda model, x: {kind: model.angle(x, kind) for kind in kinds()},
    "operators": lambda model, x: {kind: x.mean() * FACTORS[kind] for kind in kinds()},
    "buffers": lambda model, x: {kind: x.mean() * getattr(model, kind) for kind in kinds()},
    "vmap": lambda model, x: {kind: torch.vmap(torch.mul, (0, None))(x, FACTORS[kind]).mean() for kind in kinds()},
    "constants": lambda model, x: {kind: x.mean() * torch.tensor(FACTORS[kind]) for kind in kinds()},
    "a dict of a module": lambda model, x: model.angles(x),
    "no_grad": without_gradients,
}
RANDOM: Compute = lambda model, x: {kind: model.drop(x) for kind in kinds()}  # noqa: E731


def batch(rows: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 8).double(), "target": torch.randn(rows, 8).double()}


def make(how: str | Compute, together: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(COMPUTE[how] if isinstance(how, str) else how, together=together).double()


def piped(me: Rank, model: nn.Module) -> PipelineModel:
    return PipelineModel(
        model, layer_names="layers.*", num_microbatches=2, loss=nn.functional.mse_loss, group=me.group, partition="even"
    )


def begin_with(number: int) -> None:
    global first
    first = number % 3


def trained(me: Rank, model: nn.Module) -> None:
    given = batch()
    whole = copy.deepcopy(model)
    pipeline = piped(me, model)
    losses = [nn.functional.mse_loss(whole(x), y) for x, y in zip(*(t.chunk(2) for t in given.values()), strict=True)]
    torch.stack(losses).mean().backward()
    loss = pipeline.run_train(**given)
    if loss is not None:
        torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-12, atol=0)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-15, msg=name)
