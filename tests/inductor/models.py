"""Models written for DTensor's tensor parallelism, with nothing of this package."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HIDDEN, HEAD = 16, 32, 4


class MLP(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=bias), nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (linear(x).view(batch, length, -1, HEAD).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A block as in Llama: attention and SwiGLU, each behind a norm and beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.ffn = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            Attention(),
            SwiGLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


def sequence_parallel_mlp(mesh: DeviceMesh, dim: int, bias: bool = True) -> nn.Module:
    """Input and output are sharded along ``dim``."""
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(dim)),
        "down": RowwiseParallel(output_layouts=Shard(dim)),
    }
    return parallelize_module(MLP(bias), mesh, plan)


def tensor_parallel_mlp(mesh: DeviceMesh, bias: bool = True) -> nn.Module:
    """Input and output are the same on every rank."""
    return parallelize_module(MLP(bias), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence_parallel_block(mesh: DeviceMesh) -> nn.Module:
    """Input and output are sharded along dimension 1."""
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {
        "norm1": SequenceParallel(use_local_output=True),
        "attention": gathered,
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(use_local_output=True),
        "ffn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(Block(), mesh, plan)
