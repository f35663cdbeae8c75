"""Models that use DTensor's tensor parallelism and nothing of this package, for benchmarks of the compiler pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from bench.harness import NotAvailableError


@dataclass(frozen=True)
class Size:
    """The sizes of a model. ``seq`` is the number of tokens of each sequence on all ranks together."""

    seq: int
    width: int
    hidden: int
    heads: int


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self, size: Size, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, size.hidden, bias=bias)
        self.down = nn.Linear(size.hidden, size.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Attention(nn.Module):
    """Causal self-attention over the heads of this rank."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.width // size.heads
        self.q, self.k, self.v, self.o = (nn.Linear(size.width, size.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    """The feed-forward layer of a Llama-style block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and SwiGLU, each with a norm before it and a residual connection around it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(size.width) for _ in range(2))
        self.attention, self.ffn = Attention(size), SwiGLU(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


@dataclass(frozen=True)
class Model:
    """A model that is split over the ranks of a mesh, and its inputs.

    Attributes:
        make: creates the model of a size, split over a mesh. The weights do not depend on the number of ranks.
        inputs: creates this rank's input for a size and a number of ranks.
    """

    make: Callable[[Size, DeviceMesh], nn.Module]
    inputs: Callable[[Size, int], Tensor]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor itself if it is no DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mlp(dim: int, bias: bool) -> Model:
    """An MLP with sequence parallelism: input and output are sharded along ``dim``."""
    plan = {"up": ColwiseParallel(input_layouts=Shard(dim)), "down": RowwiseParallel(output_layouts=Shard(dim))}

    def inputs(size: Size, world: int) -> Tensor:
        return torch.randn(*(() if dim == 0 else (2,)), size.seq // world, size.width, requires_grad=True)

    return Model(lambda size, mesh: _parallel(MLP(size, bias), mesh, plan), inputs)


def _mlp_all_reduce() -> Model:
    """An MLP whose input and output are the same on every rank."""
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return Model(
        lambda size, mesh: _parallel(MLP(size, True), mesh, plan),
        lambda size, world: torch.randn(size.seq, size.width, requires_grad=True),
    )


def _block(batch: int) -> Model:
    """A transformer block whose input and output are sharded along dimension 1, the sequence."""

    def plan() -> dict[str, ParallelStyle]:
        found: dict[str, ParallelStyle] = {}
        for norm, layer in (("norm1", "attention"), ("norm2", "ffn")):
            found[norm] = SequenceParallel(use_local_output=True)
            found[layer] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        for name in ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up"):
            found[name] = ColwiseParallel()
        return found | {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "ffn.down")}

    return Model(
        lambda size, mesh: _parallel(Block(size), mesh, plan()),
        lambda size, world: torch.randn(batch, size.seq // world, size.width, requires_grad=True),
    )


def _block_all_reduce() -> Model:
    """A transformer block whose input and output are the same on every rank. Each layer prepares its own input."""
    columns = ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up")

    def plan() -> dict[str, ParallelStyle]:
        found: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
        return found | {name: RowwiseParallel() for name in ("attention.o", "ffn.down")}

    return Model(
        lambda size, mesh: _parallel(Block(size), mesh, plan()),
        lambda size, world: torch.randn(1, size.seq, size.width, requires_grad=True),
    )


def _torchs_transformer(batch: int) -> Model:
    """The transformer of torch's own tests, with its own plan for sequence parallelism."""

    def make(size: Size, mesh: DeviceMesh) -> nn.Module:
        try:
            from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer
        except ImportError as error:
            raise NotAvailableError(f"torch's transformer for tests cannot be imported: {error}") from None
        of_size = ModelArgs(
            vocab_size=size.width, max_seq_len=size.seq, dim=size.width, n_heads=size.heads, dropout_p=0.0
        )
        model = Transformer(of_size)
        return Transformer.parallelize(model, mesh, use_seq_parallel=True, local_output_for_attn=True)

    return Model(make, lambda size, world: torch.arange(batch * size.seq).view(batch, size.seq) % size.width)


def _parallel(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> nn.Module:
    return parallelize_module(module, mesh, plan)


MODELS = {
    "MLP, dim 0": _mlp(0, True),
    "MLP, dim 0, no bias": _mlp(0, False),
    "MLP, dim 1": _mlp(1, True),
    "MLP, dim 1, no bias": _mlp(1, False),
    "MLP, all-reduce": _mlp_all_reduce(),
    "block, batch 1": _block(1),
    "block, batch 2": _block(2),
    "block, all-reduce": _block_all_reduce(),
    "torch's Transformer": _torchs_transformer(2),
}
