"""A Llama-style language model over bytes, split over ranks by tensor and sequence parallelism.

Between blocks, each rank holds its part of the sequence, (seq / world, batch, dim). A block gathers the sequence at the
input of its matmuls and scatters it at their output ("my" means this rank's):

    x [seq/W] ── norm ── all-gather-matmul (q, k, v) ── attention over my heads ── matmul-reduce-scatter ──+── x [seq/W]
    x [seq/W] ── norm ── all-gather-matmul (gate, up) ── SwiGLU, my columns ───── matmul-reduce-scatter ──+── x [seq/W]

Every collective of the forward and the backward pass is therefore next to a matmul that can hide it. Weights are stored
as (in, out), the layout that the ops expect. The weights of rank r are slices of full weights that are drawn from one
seed, so that any number of ranks trains the same model.
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
    """The two fused operations that the model uses. See ``collectives.py`` for the implementations.

    ``rank`` and ``world`` determine which slice of the sequence and of the weights this rank holds.
    """

    name: str
    rank: int
    world: int

    def all_gather_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return ``[cat(x of every rank) @ w for w in weights]``: (seq/W, batch, k) and (k, n) to (seq, batch, n)."""
        ...

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks of ``x @ weight``.

        Shapes: (seq, batch, k) and (k, n) to (seq/W, batch, n).
        """
        ...


class FullWeights:
    """Draws the full weights of the model from one seed, one after the other, and returns this rank's slices."""

    def __init__(self, seed: int, rank: int, world: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._rank, self._world = rank, world

    def __call__(self, rows: int, columns: int, std: float, shard: int | None = None) -> nn.Parameter:
        """Draw a (rows, columns) weight and return it, or return this rank's slice of it along dimension ``shard``."""
        full = torch.empty(rows, columns).normal_(std=std, generator=self._generator)
        if shard is None:
            return nn.Parameter(full)
        return nn.Parameter(full.chunk(self._world, dim=shard)[self._rank].contiguous())


def rotary_tables(seq: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of position times frequency.

    Their shape is (seq, 1, 1, head_dim / 2), so that they broadcast over batch and heads.
    """
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), frequencies)[:, None, None, :]
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary position embedding to ``x`` (seq, batch, heads, head_dim).

    Each pair of elements (i, i + head_dim / 2) is rotated by its angle.
    """
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
        # Each is (seq, batch, my heads * head_dim). The sequence is complete here, so all rotary positions are used.
        query, key, value = (self._heads(y) for y in self.comm.all_gather_matmul(x, weights))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), is_causal=True
        )  # (batch, heads, seq, head_dim)
        # One copy to (seq, batch, ...) makes the tensor contiguous, as the matmul requires.
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

    ``seq`` is the length of the whole window. This rank holds seq / world rows from row rank * seq / world on.
    Parameters are float32 and are cast to ``dtype`` when they are used, so that the optimizer keeps its precision with
    ``dtype=torch.bfloat16``.

    ``draw`` draws the weights. Each call of ``block`` creates the next block with weights from ``draw``; see
    ``forms.py``.

    A stage of a pipeline has only some of the ``pieces``: piece 0 is the embedding, then come the blocks, and the last
    piece is norm and head. Without the first piece, the input is the output of the stage before, (seq / world, batch,
    dim). Without the last piece, the output has the same shape. The weights are equal to the weights of these pieces in
    the whole model.
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
        # Draw all weights, including the weights of other stages, so that every stage draws the same sequence.
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
        """Return the parameters that every rank holds whole: embedding, norms and head.

        Each rank computes with a different part of the sequence. The backward pass leaves only this rank's contribution
        to the gradients of these parameters, and the contributions must be summed over ranks. All other gradients are
        complete, because the backward of the collectives has summed them.
        """
        norms = [m.weight for m in self.modules() if isinstance(m, nn.RMSNorm)]
        return [*(each for each in (self.embedding, self.head) if each is not None), *norms]

    def parameter_count(self, world: int) -> int:
        """Return how many parameters the model has in total on the ``world`` ranks that share its layers."""
        whole = {id(parameter) for parameter in self.replicated_parameters()}
        return sum(local(p).numel() * (1 if id(p) in whole else world) for p in self.parameters())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which shares its memory. Return any other tensor unchanged."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def normalised(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Apply the RMS norm in float32 for every dtype of ``x``: in bfloat16, the mean of squares is too imprecise."""
    return F.rms_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.eps).to(x.dtype)
