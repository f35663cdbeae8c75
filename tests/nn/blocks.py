"""Small models, and the plans by which our styles parallelize them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from symm_overlap.nn import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

WIDTH, HIDDEN, HEAD = 8, 16, 2


class MLP(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias), nn.Linear(HIDDEN, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (linear(x).view(batch, length, -1, HEAD).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A transformer block; its norms have weights that are not all one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.ffn = Attention(), SwiGLU()
        for parameter in (self.norm1.weight, self.norm1.bias, self.norm2.weight):
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


def mlp_plan(input: Placement, output: Placement) -> dict[str, object]:
    return {"up": ColwiseParallel(input_layouts=input), "down": RowwiseParallel(output_layouts=output)}


def whole(dim: int | None, local: bool = True) -> PrepareModuleInput:
    """Return a style for a module whose linear layers share its input. The input is sharded along ``dim``, or whole if
    ``dim`` is None.
    """
    given = Replicate() if dim is None else Shard(dim)
    return PrepareModuleInput(input_layouts=given, desired_input_layouts=Replicate(), use_local_output=local)


def block_plan(dim: int | None, local: bool = True) -> dict[str, object]:
    """Return a plan for Block: sequence parallel along ``dim``, or without sharded activations if ``dim`` is None.

    If ``local`` is False, the tensors between modules are DTensors.
    """
    column = ColwiseParallel(use_local_output=True)
    plan: dict[str, object] = {f"attention.{name}": column for name in "qkv"}
    plan |= {"ffn.gate": column, "ffn.up": column}
    row = RowwiseParallel(output_layouts=Replicate() if dim is None else Shard(dim))
    plan |= {"attention.o": row, "ffn.down": row}
    if dim is not None:
        norm = SequenceParallel(sequence_dim=dim, use_local_output=local)
        plan |= {"norm1": norm, "norm2": norm}
    return plan | {name: whole(dim, local) for name in ("attention", "ffn")}
