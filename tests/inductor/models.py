"""Models written for DTensor's tensor parallelism, which use nothing of this package."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bench.harness.dtensor_models import MODELS, Size
from tests import huggingface

WIDTH, HIDDEN, HEAD = 32, 64, 4  # so that each of 8 ranks has one head


class FusedAttention(nn.Module):
    """Attention with one linear for query, key and value, as in GPT-2 and BERT."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, -1, 3 * HEAD).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class GeluMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class OlderBlock(nn.Module):
    """A block as in GPT-2 (norms first) or as in BERT (norms last). All layers have biases."""

    def __init__(self, norms_first: bool) -> None:
        super().__init__()
        self.norms_first = norms_first
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.ffn = FusedAttention(causal=norms_first), GeluMLP()

    def forward(self, x: Tensor) -> Tensor:
        if self.norms_first:
            x = x + self.attention(self.norm1(x))
            return x + self.ffn(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.ffn(x))


class FunctionalMLP(nn.Module):
    """An MLP whose weights and input are the shards of this rank, with functional collectives and without DTensor."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, hidden = group, HIDDEN // group.size()
        self.norm, self.gate, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        whole = all_gather_tensor_autograd(self.norm(x), 0, self.group)
        hidden = F.silu(self.gate(whole)) * self.up(whole)
        return x + reduce_scatter_tensor_autograd(self.down(hidden), "sum", 0, self.group)


class _Float8Matmul(torch.autograd.Function):
    """Compute ``x @ weight.t() / 2`` with float8 numbers. The gradients are not computed in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        float8, half, one = torch.float8_e4m3fn, torch.full((), 0.5), torch.ones(())
        return torch._scaled_mm(x.to(float8), weight.to(float8).t(), half, one, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight / 2, grad.t() @ x / 2


class Float8MLP(nn.Module):
    """An MLP with float8 matmuls and functional collectives. Its weights and input are the shards of this rank. Small
    integers stay exact.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, hidden = group, HIDDEN // group.size()
        self.up, self.down = (
            nn.Parameter(torch.randint(-2, 3, size).float()) for size in ((hidden, WIDTH), (WIDTH, hidden))
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = _Float8Matmul.apply(all_gather_tensor_autograd(x, 0, self.group), self.up).relu()
        return x + reduce_scatter_tensor_autograd(_Float8Matmul.apply(hidden, self.down), "sum", 0, self.group)


class Checkpointed(nn.Module):
    """A module under activation checkpointing: the backward pass runs it again. With ``keep_matmuls``, the results of
    its matmuls are saved.
    """

    def __init__(self, module: nn.Module, keep_matmuls: bool = False) -> None:
        super().__init__()
        self.module, self.keep_matmuls = module, keep_matmuls

    def forward(self, x: Tensor) -> Tensor:
        extra = {}
        if self.keep_matmuls:
            kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default]
            extra["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
        return checkpoint(self.module, x, use_reentrant=False, **extra)  # type: ignore[no-any-return]


def common(name: str) -> Callable[[DeviceMesh], nn.Module]:
    """Return a small model of the benchmarks. Input and output are sharded along dimension 1, or as its name says."""
    return partial(MODELS[name].make, Size(16, WIDTH, HIDDEN, WIDTH // HEAD))


def sequence_parallel_older_block(mesh: DeviceMesh, norms_first: bool) -> nn.Module:
    """Input and output are sharded along dimension 1."""
    plan = {
        "norm1": SequenceParallel(use_local_output=True),
        "attention.qkv": ColwiseParallel(input_layouts=Shard(1)),
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(use_local_output=True),
        "ffn.up": ColwiseParallel(input_layouts=Shard(1)),
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return parallelize_module(OlderBlock(norms_first), mesh, plan | {"attention": gathered})


def torch_transformer(mesh: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    """The model of torch's own tests of tensor parallelism, parallelised by its own function. Its input is tokens."""
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

    args = ModelArgs(n_layers=1, vocab_size=16, max_seq_len=16, dim=WIDTH, n_heads=WIDTH // HEAD, dropout_p=0.0)
    return Transformer.parallelize(Transformer(args), mesh, sequence_parallel, local_output_for_attn=True)


def llama(mesh: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    """The Llama model of Hugging Face transformers, with random weights. It maps tokens to logits."""
    model = huggingface.llama(16, 16, WIDTH, 1, heads=WIDTH // HEAD, inner=HIDDEN)
    shard = {"output_layouts": Shard(1), "use_local_output": False} if sequence_parallel else {}
    layer = "model.layers.0"
    plan: dict[str, Any] = {f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"{layer}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {f"{layer}.{name}": RowwiseParallel(**shard) for name in ("self_attn.o_proj", "mlp.down_proj")}
    if sequence_parallel:
        plan |= {f"{layer}.{name}_layernorm": SequenceParallel() for name in ("input", "post_attention")}
        plan[f"{layer}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan[layer] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
        )
        plan["model.norm"] = SequenceParallel()
        plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)
