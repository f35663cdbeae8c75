"""Stages for tests of the runtime, and a reference that runs them without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

WIDTH, ROWS = 6, 3


class Layer(nn.Module):
    """A residual layer with a matmul whose weight gradient can wait, a bias, and a norm."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def squared(result: Tensor, target: Tensor) -> Tensor:
    return (result - target).square().mean()


def batch(microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a batch and its target."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS * microbatches, WIDTH)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn(shape, generator=generator, dtype=torch.float64),
    )


def reference(
    modules: Sequence[nn.Module], x: Tensor, target: Tensor, microbatches: int, loss: Callable[..., Tensor] = squared
) -> tuple[Tensor, list[Tensor], list[dict[str, Tensor | None]]]:
    """Run the stages one after the other. Return the result, the losses, and the gradients of each stage."""
    results, losses = [], []
    for part, wanted in zip(x.tensor_split(microbatches), target.tensor_split(microbatches), strict=True):
        values: tuple[Tensor, ...] = (part,)
        for module in modules:
            out = module(*values)
            values = out if isinstance(out, tuple) else (out,)
        losses.append(loss(values[0], wanted))
        (losses[-1] / microbatches).backward()
        results.append(values[0].detach())
    return torch.cat(results), [each.detach() for each in losses], [gradients(module) for module in modules]


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of a module's parameters by name."""
    return {name: None if each.grad is None else each.grad.clone() for name, each in module.named_parameters()}


def assert_gradients(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    """Gradients must be equal up to the order of sums in float64."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert wanted is not None
        torch.testing.assert_close(found[name], wanted, rtol=1e-11, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}")
