"""A stage: what its methods return, keep and refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.runtime.stage import Stage


class Block(nn.Module):
    """Relays its second argument, changes its first in place, uses a layer twice and a parameter both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.randn(4))
        self.double()

    def forward(self, x: Tensor, skipped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.relu_(x)
        hidden = self.last(self.norm(self.shared(self.shared(hidden)).tanh())) + self.scale.exp()
        return hidden, skipped, hidden * skipped * self.scale


def arguments(microbatch: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(microbatch)
    first, second = (torch.randn(3, 4, dtype=torch.double, generator=random) for _ in range(2))
    return first.requires_grad_(), second.requires_grad_()


def reference(module: nn.Module, microbatches: int, gradients: list[Tensor]) -> list[Tensor | None]:
    """The plain backward pass: gradients of all arguments, then of the parameters, which are emptied."""
    found: list[Tensor | None] = []
    for microbatch in range(microbatches):
        x, skipped = arguments(microbatch)
        torch.autograd.backward(module(x * 1, skipped), gradients)
        found += [x.grad, skipped.grad]
    found += [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return found


@pytest.mark.parametrize("order", ["B0 B1", "I0 W0 I1 W1", "I0 I1 W0 W1", "I1 I0 W0 W1", "B1 I0 W0"])
def test_gradients_equal_the_plain_backward(order: str) -> None:
    torch.manual_seed(0)
    module = Block()
    gradients = [torch.randn(3, 4, dtype=torch.double) for _ in range(3)]
    expected = reference(module, 2, gradients)
    stage, found = Stage(module, 0), {}
    for microbatch in range(2):
        stage.forward(microbatch, arguments(microbatch), {})
    for kind, microbatch in order.split():
        if kind == "B":
            found[microbatch] = stage.backward(int(microbatch), gradients)
        elif kind == "I":
            found[microbatch] = stage.backward_input(int(microbatch), gradients)
        else:
            stage.backward_weight(int(microbatch))
    got = [*found["0"], *found["1"], *(parameter.grad for parameter in module.parameters())]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
