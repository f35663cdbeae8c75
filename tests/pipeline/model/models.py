"""Tiny float64 models of several kinds, each with a batch of eight. They have names, so that ranks can create them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import huggingface

BATCH, LENGTH, WIDTH, VOCABULARY = 8, 6, 8, 16
Batch = dict[str, Any]


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def reals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Mlp(nn.Module):
    """Layers that run in sequence. The loss is outside of the model."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


class UNet(nn.Module):
    """Each layer on the way down passes a value to a layer on the way up, the first layer to the last one."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, gain: float = 1.0) -> dict[str, Any]:
        skips = []
        for layer in self.down:
            skips.append(x)
            x = torch.tanh(layer(x)) * self.scale
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], -1)))
        return {"loss": gain * x.square().mean(), "x": x, "gain": gain}


class Shared(nn.Module):
    """The embedding and the head share a weight, all layers share a bias, and the model itself uses a parameter."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        for layer in self.layers[1:]:
            layer.bias = self.layers[0].bias
        self.register_buffer("table", torch.arange(LENGTH, dtype=torch.float64))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        allowed = mask[:, :, None] * torch.exp(-self.table)[:, None]
        x = self.embed(ids) + self.positions
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * allowed
        return F.linear(x, self.embed.weight) + self.positions.sum()


class Choosy(nn.Module):
    """A model with a branch between its layers that depends on values."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e9:
                x = -x
        return self.head(x)


def mlp(layers: int) -> tuple[nn.Module, Batch]:
    return Mlp(layers), {"x": reals(BATCH, 4), "target": reals(BATCH, 3, seed=1)}


def unet(layers: int) -> tuple[nn.Module, Batch]:
    return UNet(layers // 2), {"x": reals(BATCH, WIDTH), "gain": 3.0}


def shared(layers: int) -> tuple[nn.Module, Batch]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.float64)
    mask[0, 3:] = mask[5, 1:] = 0
    return Shared(layers), {"ids": tokens(), "mask": mask, "labels": tokens(1)}


def choosy(layers: int) -> tuple[nn.Module, Batch]:
    return Choosy(layers), {"x": reals(BATCH, 4), "target": reals(BATCH, 3, seed=1)}


def encoder(layers: int) -> tuple[nn.Module, Batch]:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 4:] = padding[6, 2:] = True
    model = nn.TransformerEncoder(layer, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    batch = {"src": reals(BATCH, LENGTH, WIDTH), "src_key_padding_mask": padding}
    return model, {**batch, "target": reals(BATCH, LENGTH, WIDTH, seed=1)}


def gpt2(layers: int) -> tuple[nn.Module, Batch]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[2, 4:] = 0
    model = huggingface.gpt2(VOCABULARY, LENGTH, WIDTH, layers, heads=2)
    return model, {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}


def llama(layers: int) -> tuple[nn.Module, Batch]:
    model = huggingface.llama(VOCABULARY, LENGTH, WIDTH, layers, heads=4, inner=12, num_key_value_heads=2)
    return model, {"input_ids": tokens(), "labels": tokens()}


def mixtral(layers: int) -> tuple[nn.Module, Batch]:
    model = huggingface.mixtral(VOCABULARY, LENGTH, WIDTH, layers, heads=2, inner=16, experts=4)
    return model, {"input_ids": tokens(), "labels": tokens()}


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


MODELS: dict[str, tuple[Callable[[int], tuple[nn.Module, Batch]], dict[str, Any]]] = {
    "mlp": (mlp, {"loss": mean_square}),
    "unet": (unet, {"layer_names": ("down.*", "up.*")}),
    "shared": (shared, {"loss": entropy, "target": "labels"}),
    "encoder": (encoder, {"loss": mean_square, "layer_cls": nn.TransformerEncoderLayer}),
    "gpt2": (gpt2, {"layer_cls": "GPT2Block"}),
    "llama": (llama, {"layer_cls": "LlamaDecoderLayer"}),
    "mixtral": (mixtral, {"layer_cls": "MixtralDecoderLayer"}),
    "choosy": (
        choosy,
        {"loss": mean_square, "trace": False, "layer_names": "layers.*", "first": "embed", "last": "head"},
    ),
}
"""Each model, with the arguments that describe it to `PipelineModel`."""


def make(name: str, layers: int) -> tuple[nn.Module, Batch, dict[str, Any]]:
    """Return a float64 model with the same parameters on every rank, its batch, and arguments of `PipelineModel`."""
    torch.manual_seed(0)
    function, options = MODELS[name]
    model, batch = function(layers)
    return model.double(), batch, dict(options)


def loss_of(output: Any, batch: Batch, options: dict[str, Any]) -> Tensor:
    """Return the loss of the whole model for its outputs."""
    if "loss" in options:
        return options["loss"](output, batch[options.get("target", "target")])
    return output["loss"] if isinstance(output, dict) else output.loss


def inputs_of(batch: Batch, options: dict[str, Any]) -> Batch:
    """Return the part of a batch that is passed to the model."""
    target = options.get("target", "target") if "loss" in options else None
    return {name: value for name, value in batch.items() if name != target}


def microbatches(batch: Batch, count: int) -> list[Batch]:
    return [
        {
            name: value.tensor_split(count)[index] if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        for index in range(count)
    ]
