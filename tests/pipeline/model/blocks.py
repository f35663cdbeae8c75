"""Random models that call their layers in blocks such as ``with torch.no_grad()``, in each other and in checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pipeline.model.models import WIDTH

Program = list[tuple[str, "Program"]]
"""Steps with their names, and for those that are blocks the steps inside."""

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "not bfloat16": lambda: torch.autocast("cpu", enabled=False),
    "inference": torch.inference_mode,
}
BLOCKS = *MODES, "checkpoint", "reentrant checkpoint", "vmap"
STEPS = "layer", "layer", "add", "weight", "mask", "view", "in place", "same", "keep", "kept"


def program(chosen: random.Random, depth: int = 3, keeps: bool = True) -> Program:
    """Return a random program. What a checkpoint runs again keeps nothing, and uses nothing that was kept. Nor is
    anything kept that is computed in inference mode, with which autograd computes nothing later."""
    found: Program = []
    for _ in range(chosen.randint(1, 5)):
        if depth and chosen.random() < 0.4:
            name = chosen.choice(BLOCKS)
            inside = keeps and not name.endswith(("checkpoint", "inference"))
            found.append((name, program(chosen, depth - 1, inside)))
        else:
            found.append((chosen.choice(STEPS if keeps else STEPS[:-2]), []))
    return found


def numbered(steps: Program, first: int = 0) -> tuple[Program, int]:
    """Return a program in which each layer has a number, and the next number."""
    found: Program = []
    for name, inner in steps:
        inside, first = numbered(inner, first)
        found.append((f"{name} {first}" if name == "layer" else name, inside))
        first += name == "layer"
    return found, first


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Blocks(nn.Module):
    """A model that runs a program. Reentrant checkpoints lose gradients if nothing that they are given has any, so the
    whole model of a comparison has none."""

    def __init__(self, steps: Program, reentrant: bool) -> None:
        super().__init__()
        self.steps, layers = numbered([*steps, ("layer", []), ("layer", [])])
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(layers))
        self.weight, self.reentrant = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        kept = [x * 2]
        found = self.run(x * 1, self.steps, kept)
        for each in kept:
            found = found + each
        return found.float()

    def run(self, x: Tensor, steps: Program, kept: list[Tensor]) -> Tensor:
        for name, inner in steps:
            x = self.block(x, name, inner, kept) if name in BLOCKS else self.step(x, name, kept)
        return x

    def block(self, x: Tensor, name: str, inner: Program, kept: list[Tensor]) -> Tensor:
        if name.endswith("checkpoint"):
            if torch.is_inference_mode_enabled():  # in which torch 2.11 has none
                return self.run(x, inner, kept)
            reentrant = self.reentrant and name.startswith("reentrant")
            found: Tensor = checkpoint(self.run, x, inner, kept, use_reentrant=reentrant)
            return found
        if name == "vmap":
            x = self.run(x, inner, kept)
            with torch.no_grad():
                return torch.vmap(lambda row: row * 2)(x)
        with MODES[name]():
            found = self.run(x.float(), inner, kept).float()
        return found.clone() if name == "inference" else found

    def step(self, x: Tensor, name: str, kept: list[Tensor]) -> Tensor:
        word, *number = name.split()
        if word == "layer":
            found: Tensor = self.layers[int(number[0])](x)
            return found
        if word == "keep":
            kept.append(x)
        return {
            "add": lambda: x + 1,
            "weight": lambda: x * self.weight,
            "mask": lambda: x.masked_fill(kept[0] > 1, 0.5),
            "view": lambda: x.view(-1).view(x.shape),
            "same": lambda: nn.functional.dropout(x.to(x.dtype), 0.5, training=False),
            "in": lambda: (x + 1).mul_(0.5),
            "keep": lambda: x,
            "kept": lambda: x + kept[-1],
        }[word]()
