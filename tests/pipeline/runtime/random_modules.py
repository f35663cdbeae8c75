"""Random modules for split backward passes, with every kind of node, shared parameters, branches and relayed values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Product(torch.autograd.Function):
    """A matmul whose backward computes both gradients and clears what was saved, so it cannot run twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.kept = factor, (x.clone(), weight.clone())
        return factor * x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.kept
        ctx.kept = None
        return ctx.factor * grad @ weight.t(), ctx.factor * x.t() @ grad, None


class ProductInParts(torch.autograd.Function):
    """A matmul whose backward pass may run in parts."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, weight: Tensor) -> Tensor:
        ctx.factor, ctx.backward_in_parts = factor, True
        ctx.save_for_backward(x, weight)
        return factor * x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _, first, second = ctx.needs_input_grad
        grad_x = ctx.factor * grad @ weight.t() if first else None
        return None, grad_x, ctx.factor * x.t() @ grad if second else None


class RandomModule(nn.Module):
    """A random program over rows of `WIDTH` values. It computes one to three outputs from its inputs.

    Args:
        seed: the seed of the program and of the parameters.
        size: the number of steps of the program.
        inputs: the number of arguments of `forward`.
    """

    def __init__(self, seed: int, size: int, inputs: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in range(4))
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=self.random.random() < 0.7) for _ in range(3))
        self.norm, self.table = nn.LayerNorm(WIDTH), nn.Embedding(WIDTH, WIDTH)
        self.double()
        for parameter in self.parameters():
            parameter.requires_grad_(self.random.random() < 0.85)
        steps = self.random.sample(STEPS, self.random.randint(3, len(STEPS)))
        recomputed = self.random.choice([0.0, 0.0, 0.0, 0.2])
        self.program = [
            (self.random.choice(steps), [self.random.random() for _ in range(4)], self.random.random() < recomputed)
            for _ in range(size)
        ]
        self.kept = [self.random.random() for _ in range(self.random.randint(1, 3))]
        self.inputs = inputs

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        values = list(args)
        for step, numbers, recomputed in self.program:
            # Choose the latest values most often, so that graphs are deep.
            first, second = (values[-1 - int(number**2 * len(values))] for number in numbers[:2])
            if recomputed:
                values.append(checkpoint(step, self, first, second, numbers, use_reentrant=False))
            else:
                values.append(step(self, first, second, numbers))
        return tuple(values[-1 - int(number * len(values))] for number in self.kept)


def choose(items: Sequence[Any], number: float) -> Any:
    return items[int(number * len(items))]


Step = Callable[[RandomModule, Tensor, Tensor, list[float]], Tensor]
STEPS: list[Step] = [
    lambda m, x, y, n: choose(m.linears, n[2])(x),
    lambda m, x, y, n: choose(m.linears, n[2])(x).relu_(),
    lambda m, x, y, n: torch.tanh(x @ choose(m.matrices, n[2])),
    lambda m, x, y, n: torch.tanh(x @ (choose(m.matrices, n[2]) * choose(m.vectors, n[3]).exp())),
    lambda m, x, y, n: x * choose(m.vectors, n[2]) + choose(m.vectors, n[3]),
    lambda m, x, y, n: torch.addcmul(x, choose(m.vectors, n[2]).sin(), choose(m.vectors, n[2])) * 0.5,
    lambda m, x, y, n: m.norm(x),
    lambda m, x, y, n: x + y,
    lambda m, x, y, n: torch.tanh(x * y),
    lambda m, x, y, n: torch.cat(torch.cat([x, y], 1).chunk(4, 1)[1:3], 1),
    lambda m, x, y, n: (x @ y.t()).softmax(-1) @ x,
    lambda m, x, y, n: x.detach() * n[2],
    lambda m, x, y, n: torch.tanh(choose(m.matrices, n[2]))[: x.shape[0]] * n[3],
    lambda m, x, y, n: m.table(torch.arange(x.shape[0])) + choose(m.vectors, n[3]),
    lambda m, x, y, n: Product.apply(x, choose(m.matrices, n[2]), 0.5),
    lambda m, x, y, n: ProductInParts.apply(0.5, x, choose(m.matrices, n[2])),
    lambda m, x, y, n: (
        sum((x @ part for part in choose(m.matrices, n[2]).unbind(0)), torch.zeros(x.shape[0], dtype=x.dtype))[:, None]
        * y
    ),
]
