"""A Llama-style language model over bytes, split over ranks by tensor and sequence parallelism.

Between blocks a rank holds its part of the sequence, (seq / world, batch, dim). A block gathers the sequence on the way
into its matmuls and scatters it on the way out:

    x [seq/W] ── norm ── all-gather-matmul (q, k, v) ── attention over my heads ── matmul-reduce-scatter ──+── x [seq/W]
    x [seq/W] ── norm ── all-gather-matmul (gate, up) ── SwiGLU, my columns ───── matmul-reduce-scatter ──+── x [seq/W]

so that every communication of the forward and the backward pass touches a matmul it can hide behind. Weights are stored
(in, out), as the ops take them. Rank r's weights are slices of one seeded full weight: any number of ranks trains the
same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symm_overlap.demo.config import VOCABULARY, ModelSize


class Collectives(Protocol):
    """The two fused operations the model is made of; see ``collectives.py`` for the implementations.

    ``rank`` and ``world`` say which slice of the sequence and of the weights is here.
    """

    name: str
    rank: int
    world: int

    def all_gather_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """``[cat(x of every rank) @ w for w in weights]``: (seq/W, batch, k) and (k, n) to (seq, batch, n)."""
        ...

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        """My rows of the sum over ranks of ``x @ weight``: (seq, batch, k) and (k, n) to (seq/W, batch, n)."""
        ...


class FullWeights:
    """Draws the model's full weights from one seed, one after the other, and hands out this rank's slices."""

    def __init__(self, seed: int, rank: int, world: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._rank, self._world = rank, world

    def __call__(self, rows: int, columns: int, std: float, shard: int | None = None) -> nn.Parameter:
        """A (rows, columns) weight, or of it this rank's slice along dimension ``shard``."""
        full = torch.empty(rows, columns).normal_(std=std, generator=self._generator)
        if shard is None:
            return nn.Parameter(full)
        return nn.Parameter(full.chunk(self._world, dim=shard)[self._rank].contiguous())


def rotary_tables(seq: int, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position times frequency: (seq, 1, 1, head_dim / 2), to broadcast over batch and heads."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), frequencies)[:, None, None, :]
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (seq, batch, heads, head_dim): turns each pair (i, i + head_dim/2) by its angle."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention over this rank's heads."""

    def __init__(self, size: ModelSize, draw: FullWeights, comm: Collectives) -> None:
        super().__init__()
        self.comm = comm
        self.head_dim = size.dim // size.heads
        std = size.dim**-0.5
        self.query, self.key, self.value = (draw(size.dim, size.dim, std, shard=1) for _ in range(3))
        self.output = draw(size.dim, size.dim, std / math.sqrt(2 * size.layers), shard=0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        weights = [w.to(x.dtype) for w in (self.query, self.key, self.value)]
        # (seq, batch, my heads * head_dim) each; the sequence is whole here, so the rotary positions are too.
        query, key, value = (self._heads(y) for y in self.comm.all_gather_matmul(x, weights))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), is_causal=True
        )  # (batch, heads, seq, head_dim)
        # In one copy to (seq, batch, ...) with everything contiguous, as the matmul wants it.
        return self.comm.matmul_reduce_scatter(mixed.permute(2, 0, 1, 3).flatten(2), self.output.to(x.dtype))

    def _heads(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:-1], -1, self.head_dim)


class FeedForward(nn.Module):
    """SwiGLU: ``(silu(x @ gate) * (x @ up)) @ down`` over this rank's columns of the hidden width."""

    def __init__(self, size: ModelSize, draw: FullWeights, comm: Collectives) -> None:
        super().__init__()
        self.comm = comm
        self.gate, self.up = (draw(size.dim, size.hidden, size.dim**-0.5, shard=1) for _ in range(2))
        self.down = draw(size.hidden, size.dim, size.hidden**-0.5 / math.sqrt(2 * size.layers), shard=0)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.comm.all_gather_matmul(x, [self.gate.to(x.dtype), self.up.to(x.dtype)])
        return self.comm.matmul_reduce_scatter(F.silu(gate) * up, self.down.to(x.dtype))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, size: ModelSize, draw: FullWeights, comm: Collectives) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim, eps=1e-6)
        self.attention = Attention(size, draw, comm)
        self.feed_forward_norm = nn.RMSNorm(size.dim, eps=1e-6)
        self.feed_forward = FeedForward(size, draw, comm)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed: Tensor = x + self.attention(normalised(self.attention_norm, x), cos, sin)
        done: Tensor = mixed + self.feed_forward(normalised(self.feed_forward_norm, mixed))
        return done


class LanguageModel(nn.Module):
    """This rank's part of the model. Maps bytes (seq / world, batch) to float32 logits (seq / world, batch, 256).

    ``seq`` is the whole window; the rank holds rows rank * seq / world onwards. Parameters are float32 and are cast to
    ``dtype`` where they are used, so that the optimizer keeps its precision under ``dtype=torch.bfloat16``.

    ``draw`` makes the weights, and ``block`` makes one block after the other with it; see ``forms.py``.

    A stage of a pipeline has some of the pieces only: 0 is the embedding, then come the blocks, and the last one is
    norm and head. Without the first one it takes what the stage before returned, (seq / world, batch, dim), and without
    the last one it returns the same. Its weights are those that the whole model has there.
    """

    def __init__(
        self,
        size: ModelSize,
        seq: int,
        draw: FullWeights,
        block: Callable[[], nn.Module],
        dtype: torch.dtype,
        pieces: range | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        pieces = range(size.pieces) if pieces is None else pieces
        # All weights are drawn one after another from one seed, also those that other stages keep.
        embedding = draw(VOCABULARY, size.dim, 1.0)
        self.embedding = embedding if 0 in pieces else None
        self.blocks = nn.ModuleList()
        for number in range(1, size.layers + 1):
            made = block()
            if number in pieces:
                self.blocks.append(made)
        ends = size.pieces - 1 in pieces
        self.norm = nn.RMSNorm(size.dim, eps=1e-6) if ends else None
        head = draw(size.dim, VOCABULARY, 0.1 * size.dim**-0.5)
        self.head = head if ends else None
        cos, sin = rotary_tables(seq, size.dim // size.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = F.embedding(x, self.embedding).to(self.dtype)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        if self.norm is None or self.head is None:
            return x
        logits: Tensor = normalised(self.norm, x) @ self.head.to(self.dtype)
        return logits.float()

    def replicated_parameters(self) -> list[nn.Parameter]:
        """The parameters that every rank holds whole: embedding, norms and head.

        Each rank sees its own part of the sequence, so the gradient of these is the sum over ranks of what backward
        leaves here. All other gradients are complete: the backward of the collectives has summed them.
        """
        norms = [m.weight for m in self.modules() if isinstance(m, nn.RMSNorm)]
        return [*(each for each in (self.embedding, self.head) if each is not None), *norms]

    def parameter_count(self, world: int) -> int:
        """How many parameters the model has over ``world`` ranks that share its layers."""
        whole = {id(parameter) for parameter in self.replicated_parameters()}
        return sum(local(p).numel() * (1 if id(p) in whole else world) for p in self.parameters())


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, in the same memory; any other tensor itself."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def normalised(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """RMS norm, in float32 whatever the dtype of ``x``: the mean of squares loses too much in bfloat16."""
    return F.rms_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.eps).to(x.dtype)
