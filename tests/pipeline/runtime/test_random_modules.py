"""Split backward passes of the modules in random_modules.py have the gradients of the plain backward pass."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from symm_overlap.pipeline.runtime.stage import Stage
from tests.pipeline.runtime.random_modules import WIDTH, RandomModule


def gradients(seed: int, steps: str) -> list[Tensor | None]:
    """Return the gradients of the inputs, then of the parameters. ``steps`` is "plain", "B" or "IW"."""
    chosen = random.Random(seed)
    inputs = chosen.randint(1, 3)
    module = RandomModule(seed, chosen.randint(1, 18), inputs)
    values = torch.Generator().manual_seed(seed)

    def rows(like: Tensor | None = None) -> Tensor:
        return torch.randn((3, WIDTH) if like is None else like.shape, dtype=torch.double, generator=values)

    leaves = [rows().requires_grad_(chosen.random() < 0.8) for _ in range(inputs)]
    stage = Stage(module, 1)
    outputs = module(*(x * 1 for x in leaves)) if steps == "plain" else stage.forward(0, tuple(leaves), {})
    given = [rows(out) if chosen.random() < 0.85 else None for out in outputs]
    found: list[Tensor | None] = []
    if steps == "plain":
        pairs = [(o, grad) for o, grad in zip(outputs, given, strict=True) if grad is not None and o.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        found = [x.grad for x in leaves]
    elif steps == "B":
        found += stage.backward(0, given)
    else:
        found += stage.backward_input(0, given)
        stage.backward_weight(0)
    return [*found, *(parameter.grad for parameter in module.parameters())]


def check(seed: int) -> None:
    plain = gradients(seed, "plain")
    for steps in ("B", "IW"):
        torch.testing.assert_close(gradients(seed, steps), plain, rtol=1e-12, atol=1e-12, msg=f"{seed=} {steps=}")


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_modules_have_the_gradients_of_the_plain_backward(first: int) -> None:
    for seed in range(first, first + 40):
        check(seed)
