"""Random models of small blocks, of which random modules are sharded by FSDP2."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

WORDS = 11
KINDS = ["linear", "mlp", "norm", "attention", "choice", "unused", "frozen", "low rank", "scale", "nested"]


class Part(nn.Module):
    """One block. It returns a tensor of the shape of its input, alone, in a tuple or in a dict."""

    def __init__(self, draw: random.Random, width: int, depth: int = 0) -> None:
        super().__init__()
        self.kind = draw.choice(KINDS[: -1 if depth else None])
        hidden = draw.choice([1, 2, 3, 5, 8, 17])
        self.returns, self.calls = draw.choice(["tensor"] * 4 + ["tuple", "dict"]), draw.choice([1] * 6 + [2])
        self.recomputed = draw.random() < 0.2
        self.linear = nn.Linear(width, width, bias=draw.random() < 0.7)
        if self.kind in ("mlp", "low rank"):
            self.up, self.down = nn.Linear(width, hidden, bias=draw.random() < 0.7), nn.Linear(hidden, width)
        self.linear.requires_grad_(self.kind not in ("frozen", "low rank"))
        if self.kind == "norm":
            self.norm = nn.LayerNorm(width)
        if self.kind == "choice":
            self.choices = nn.ModuleList(nn.Linear(width, width) for _ in range(2 + hidden % 2))
        if self.kind == "unused":
            self.other = nn.Linear(hidden, width)
        if self.kind == "scale":
            self.scale = nn.Parameter(torch.full((1,), 0.7))
        if self.kind == "nested":
            self.parts = nn.ModuleList(Part(draw, width, 1) for _ in range(draw.randint(1, 3)))

    def forward(self, x: Tensor, step: int) -> Any:
        x = x.to(self.linear.weight.dtype)
        y = self.linear(self.norm(x) if self.kind == "norm" else x)
        if self.kind in ("mlp", "low rank"):
            y = y + self.down(F.gelu(self.up(x)) if self.kind == "mlp" else self.up(x))
        elif self.kind == "attention":
            y = x + F.scaled_dot_product_attention(x[None], y[None], y[None])[0]
        elif self.kind == "choice":
            y = y + self.choices[step % len(self.choices)](x)
        elif self.kind == "scale":
            y = y + x * self.scale
        elif self.kind == "nested":
            for part in self.parts:
                y = called(part, y, step)
        y = torch.tanh(y)
        return {"tensor": y, "tuple": (y, y.mean(), None, 3), "dict": {"y": y, "more": [y.sum()]}}[self.returns]


def called(part: Any, x: Tensor, step: int) -> Tensor:
    """Call a block as often as it says, and return its output."""
    for _ in range(part.calls):
        again = part.recomputed and torch.is_grad_enabled()
        out = checkpoint(part, x, step, use_reentrant=False) if again else part(x, step)
        if isinstance(out, tuple):
            x = out[0] + 0.1 * out[1]
        else:
            x = out["y"] + 0.001 * out["more"][0] if isinstance(out, dict) else out
    return x


class Head(nn.Linear):
    """Converts its input to the dtype of its weight, which FSDP2 may have converted."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Model(nn.Module):
    """Blocks, perhaps after an embedding and before a head, which may share one weight."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.width = draw.choice([3, 4, 5, 7, 8, 16])
        self.embedding = nn.Embedding(WORDS, self.width) if draw.random() < 0.4 else None
        self.parts = nn.ModuleList(Part(draw, self.width) for _ in range(draw.randint(1, 5)))
        self.head = Head(self.width, WORDS, bias=draw.random() < 0.5) if draw.random() < 0.6 else None
        self.order = [*range(len(self.parts)), *([0] if draw.random() < 0.15 else [])]
        self.tied = self.embedding is not None and self.head is not None and draw.random() < 0.4
        if self.tied:
            self.head.weight = self.embedding.weight  # type: ignore[union-attr]

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for number in self.order:
            x = called(self.parts[number], x, step)
        return x if self.head is None else self.head(x)


def sharded(draw: random.Random, seed: int, mesh: DeviceMesh) -> Model:
    """Return a model, in which some of the modules and the whole are sharded."""
    torch.manual_seed(seed)
    model = Model(draw).to(draw.choice([torch.float64, torch.float32, torch.float32]))
    single, double = torch.float32, torch.float64
    kinds = [(None, None)] * 4 + [(None, single), (None, double), (single, single), (single, double), (double, single)]
    param, reduce = draw.choice(kinds)
    policy = MixedPrecisionPolicy(param, reduce, draw.choice([None, None, single, double]), draw.random() < 0.9)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if draw.random() < 0.2:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    reshard = draw.choice([[True], [True], [False], [None], [True, False, None]])
    share = draw.choice([0.3, 0.6, 1.0])
    candidates = [module for module in model.modules() if isinstance(module, Part)]
    candidates += [] if model.tied else [module for module in (model.embedding, model.head) if module is not None]
    for module in reversed(candidates):  # those inside others first
        if draw.random() < share:
            fully_shard(module, reshard_after_forward=draw.choice(reshard), **options)
    fully_shard(model, reshard_after_forward=draw.choice(reshard), **options)
    return model
