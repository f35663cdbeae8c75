"""Train models of a torchtitan checkout by its own parallel plans, with torch's styles and with ours, and compare both.

::

    torchrun --nproc-per-node 2 -m tests.nn.torchtitan ~/torchtitan llama3
    torchrun --nproc-per-node 4 -m tests.nn.torchtitan ~/torchtitan deepseek_v3 --tp 2 --checkpoint full
    torchrun --nproc-per-node 2 -m tests.nn.torchtitan ~/torchtitan llama3 --compile --explicit-attention
    torchrun --nproc-per-node 2 -m tests.nn.torchtitan ~/torchtitan qwen3 --compile --by pass

The checkout must have plans that use the styles of ``torch.distributed.tensor.parallel``, such as that of January 2026
(commit 92401723a). It is used unchanged: only the names of the styles in its ``parallelize`` modules are replaced. It
needs the packages tyro, einops, torchdata, datasets, tensorboard and triton.

The models train for a few steps in float32 on random tokens, on CPU. The command prints the losses of both, and the
largest relative difference of a gradient in the first step. It fails if they differ by more than rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as parallel
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import symm_overlap.fsdp
import symm_overlap.inductor
import symm_overlap.nn

STEPS, BATCH, LENGTH, VOCABULARY, LAYERS = 4, 2, 32, 256, 3
LOSS_BOUND, GRADIENT_BOUND = 1e-4, 1e-4
MODELS = ("llama3", "llama4", "qwen3", "deepseek_v3")
STYLES = [name for name in symm_overlap.nn.__all__ if hasattr(parallel, name)]

Losses = list[float]
Gradients = dict[str, Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="folder of torchtitan")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--tp", type=int, help="ranks of tensor parallelism; the others shard by FSDP2 (default: all)")
    parser.add_argument("--checkpoint", choices=["none", "selective", "full"], default="none")
    parser.add_argument(
        "--compile", action="store_true", help="compile our model's layers; torch's stays in eager mode"
    )
    parser.add_argument(
        "--by", choices=["styles", "pass"], default="styles", help="pass: torch's styles, compiled by ours"
    )
    parser.add_argument("--fsdp", action="store_true", help="FSDP2's collectives through symmetric memory, too")
    parser.add_argument(
        "--explicit-attention",
        action="store_true",
        help="attention by two matmuls: torch 2.13 cannot compile its own in a checkpoint beside DTensors",
    )
    return parser.parse_args()


def attention(explicit: bool) -> Callable[..., Tensor]:
    """Return a forward for torchtitan's attention that uses local tensors: DTensor has no rule for attention on CPU."""

    def causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        if not explicit:
            return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True)
        scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, float("-inf")).softmax(-1) @ v

    def forward(module: Any, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        if not isinstance(q, DTensor):
            return causal(q, k, v, scale)
        local = causal(q.to_local(), k.to_local(), v.to_local(), scale)  # type: ignore[attr-defined]
        return DTensor.from_local(local, q.device_mesh, q.placements)

    return forward


def load(options: argparse.Namespace) -> Any:
    """Import torchtitan and return the model's specification. Without an accelerator torchtitan would expect CUDA."""
    sys.path.insert(0, options.checkout)
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    integers = torch.histc  # torch has no CPU kernel for integers, which torchtitan counts
    torch.histc = lambda x, *sizes, **named: integers(x.float(), *sizes, **named).long()  # type: ignore[assignment]
    wrapper = importlib.import_module("torchtitan.models.attention").ScaledDotProductAttentionWrapper
    wrapper.forward = attention(options.explicit_attention)
    return importlib.import_module(f"torchtitan.models.{options.model}").get_train_spec()


@contextmanager
def styles_of(library: Any) -> Iterator[None]:
    """Let torchtitan's plans use the styles of ``library`` inside the block."""
    modules = [importlib.import_module(f"torchtitan.models.{model}.infra.parallelize") for model in MODELS]
    names = [(module, name) for module in modules for name in STYLES if hasattr(module, name)]
    before = [getattr(module, name) for module, name in names]
    for module, name in names:
        setattr(module, name, getattr(library, name))
    yield
    for (module, name), style in zip(names, before, strict=True):
        setattr(module, name, style)


def fill(model: nn.Module) -> None:
    """Give every parameter values that depend on its name only."""
    for name, parameter in model.named_parameters():
        seed = int(hashlib.sha256(plain(name).encode()).hexdigest()[:8], 16)
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.05
        whole += parameter.dim() == 1  # the weights of norms
        mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
        parameter.data.copy_(whole if mesh is None else distribute_tensor(whole, mesh, placements))


def plain(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def train(spec: Any, dims: Any, config: Any, args: Any, after: Callable[[nn.Module], None]) -> tuple[Losses, Gradients]:
    """Train for a few steps. Return the losses, and the gradients of the first step by parameter."""
    with torch.device("meta"):
        model = spec.model_cls(args)
    model = spec.parallelize_fn(model, dims, config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        fill(model)
    after(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], {}
    for step in range(STEPS):
        seed = 10 * step + dist.get_rank() // dims.tp
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        with parallel.loss_parallel() if dims.tp > 1 else nullcontext():
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        if step == 0:
            gradients = {
                plain(name): full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
        losses.append(full(loss).item())
    return losses, gradients


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class TorchWithCompleteEmbeddings:
    """torch's styles, except for embeddings: a compiled layer behind torch 2.13's returns no gradient (docs/nn.md)."""

    def __getattr__(self, name: str) -> Any:
        return Embeddings if name == "RowwiseParallel" else getattr(parallel, name)


class Embeddings(parallel.RowwiseParallel):
    """Our style for an embedding, and torch's for a linear layer."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        ours = isinstance(module, nn.Embedding)
        self.__class__ = symm_overlap.nn.RowwiseParallel if ours else parallel.RowwiseParallel  # type: ignore[assignment]
        return self._apply(module, device_mesh)


def main() -> int:
    options = arguments()
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    tp = options.tp or world
    spec = load(options)
    config = importlib.import_module("torchtitan.config").JobConfig()
    config.training.seq_len, config.training.mixed_precision_param = LENGTH, "float32"
    config.parallelism.tensor_parallel_degree = tp
    config.activation_checkpoint.mode = options.checkpoint
    config.activation_checkpoint.selective_ac_option = "op"
    config.compile.components = ["model"]
    args = deepcopy(spec.model_args["debugmodel"])
    args.update_from_config(config)
    args.n_layers, args.vocab_size = LAYERS, VOCABULARY
    sizes = {"dp_replicate": 1, "dp_shard": world // tp, "cp": 1, "tp": tp, "pp": 1, "ep": 1, "etp": 1}
    dims = importlib.import_module("torchtitan.distributed").ParallelDims(**sizes, world_size=world)
    dims.build_mesh()
    with styles_of(parallel):
        expected, expected_gradients = train(spec, dims, config, args, lambda model: None)
    config.compile.enable = options.compile
    by_pass = options.by == "pass"
    compiled = symm_overlap.inductor.enabled(small=True) if by_pass else nullcontext()
    with styles_of(TorchWithCompleteEmbeddings() if by_pass else symm_overlap.nn), compiled:
        through = (lambda model: symm_overlap.fsdp.apply(model)) if options.fsdp else (lambda model: None)
        found, gradients = train(spec, dims, config, args, through)
    assert gradients.keys() == expected_gradients.keys(), gradients.keys() ^ expected_gradients.keys()
    apart = [float((gradients[n] - g).norm() / g.norm().clamp(min=1e-12)) for n, g in expected_gradients.items()]
    if rank == 0:
        print("losses, torch:", *(f"{loss:.6f}" for loss in expected))
        print("losses, ours: ", *(f"{loss:.6f}" for loss in found))
        print(f"largest relative difference of a gradient: {max(apart):.1e}")
        if by_pass:
            print(symm_overlap.inductor.report())
    dist.destroy_process_group()
    alike = all(abs(one - other) < LOSS_BOUND for one, other in zip(found, expected, strict=True))
    # Each is compared with the bound, because max() may pass over a NaN.
    return 0 if alike and all(each < GRADIENT_BOUND for each in apart) else 1


if __name__ == "__main__":
    sys.exit(main())
