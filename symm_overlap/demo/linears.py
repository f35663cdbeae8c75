"""The model's blocks as a program without this package would write them: with `nn.Linear`, and without collectives.

The arithmetic is the same as in ``model.py``. ``dtensor.py`` splits these blocks over ranks with `parallelize_module`,
and ``data_parallel.py`` shares them among ranks that train on different windows.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symm_overlap.demo.config import ModelSize
from symm_overlap.demo.model import FullWeights, normalised, rotate


def linear(inputs: int, outputs: int, std: float, draw: FullWeights) -> nn.Linear:
    """Return a linear layer without a bias, with a weight that ``draw`` returns."""
    made = nn.Linear(inputs, outputs, bias=False, device="meta")
    made.weight = nn.Parameter(draw(inputs, outputs, std).detach().t().contiguous())
    return made


class Attention(nn.Module):
    """Causal self-attention over all heads, or over this rank's heads if `parallelize_module` has split it."""

    def __init__(self, size: ModelSize, draw: FullWeights) -> None:
        super().__init__()
        self.head_dim = size.dim // size.heads
        std = size.dim**-0.5
        self.query, self.key, self.value = (linear(size.dim, size.dim, std, draw) for _ in range(3))
        self.output = linear(size.dim, size.dim, std / math.sqrt(2 * size.layers), draw)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (self._heads(linear(x)) for linear in (self.query, self.key, self.value))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), is_causal=True
        )  # (batch, heads, seq, head_dim)
        done: Tensor = self.output(mixed.permute(2, 0, 1, 3).flatten(2))
        return done

    def _heads(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:-1], -1, self.head_dim)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: ModelSize, draw: FullWeights) -> None:
        super().__init__()
        self.gate, self.up = (linear(size.dim, size.hidden, size.dim**-0.5, draw) for _ in range(2))
        self.down = linear(size.hidden, size.dim, size.hidden**-0.5 / math.sqrt(2 * size.layers), draw)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return done


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, size: ModelSize, draw: FullWeights) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim, eps=1e-6)
        self.attention = Attention(size, draw)
        self.feed_forward_norm = nn.RMSNorm(size.dim, eps=1e-6)
        self.feed_forward = FeedForward(size, draw)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Weights are float32 and are cast when they are used.
        with torch.autocast(x.device.type, x.dtype, enabled=x.dtype != torch.float32):
            mixed: Tensor = x + self.attention(normalised(self.attention_norm, x), cos, sin)
            done: Tensor = mixed + self.feed_forward(normalised(self.feed_forward_norm, mixed))
        return done
