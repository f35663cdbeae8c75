"""A small model with every special case that FSDP must handle, and functions that train it under DDP and FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HIDDEN = 11, 6, 9  # neither 2 nor 3 ranks divide all sizes, so some shards are uneven
ROWS, STEPS, MICROBATCHES = 3, 10, 3


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        adam: use AdamW instead of SGD with momentum.
        dtype: the dtype of the parameters.
        mixed: compute in bfloat16, and reduce in the dtype of the parameters.
        recompute: use activation checkpointing for every block.
        microbatches: the number of microbatches whose gradients are accumulated.
        sync: reduce gradients after each microbatch instead of only after the last one.
        frozen: the norm of every block, and all of the last block, need no gradient.
        tied: the head has the weight of the embedding.
        twice: the first block is used again after the last.
        reshard: blocks free their gathered parameters after the forward.
    """

    adam: bool = False
    dtype: torch.dtype = torch.float64
    mixed: bool = False
    recompute: bool = False
    microbatches: int = 1
    sync: bool = True
    frozen: bool = False
    tied: bool = False
    twice: bool = False
    reshard: bool = True


class Block(nn.Module):
    """A norm and two linear layers, added to the residual stream."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    """An embedding, three blocks and a head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(case.recompute) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if case.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, *self.blocks[:1]] if self.case.twice else self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class CastTo(nn.Module):
    """Mixed precision by hand: ``inner`` computes with its parameters in ``dtype``."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        cast = {name: parameter.to(self.dtype) for name, parameter in self.inner.named_parameters()}
        logits: Tensor = functional_call(self.inner, cast, (tokens,))
        return logits


def model_of(case: Case) -> Model:
    """Return the model, with the same values on every rank."""
    torch.manual_seed(0)
    model = Model(case).to(case.dtype)
    if case.frozen:
        for module in (*(block.norm for block in model.blocks), model.blocks[-1]):
            module.requires_grad_(False)
    return model


Snapshot = tuple[Tensor, dict[str, Tensor]]
"""The loss of this rank in a step, and the parameters after it. Only the first and the last step have parameters."""


def trained(case: Case, module: nn.Module, rank: int, last: Callable[[bool], None] | None = None) -> list[Snapshot]:
    """Train for `STEPS` steps and return a snapshot of each. Every rank has its own windows.

    Args:
        last: for FSDP: is called before each microbatch with whether its gradients are reduced. If it is None,
            ``module`` is DDP, and ``no_sync`` keeps DDP from reducing the gradients of the other microbatches.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if case.adam:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    found = []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for number in range(case.microbatches):
            reduces = case.sync or number == case.microbatches - 1
            random = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
            tokens, targets = (torch.randint(VOCABULARY, (ROWS,), generator=random) for _ in range(2))
            if last is not None:
                last(reduces)
            with contextlib.nullcontext() if last is not None or reduces else module.no_sync():  # type: ignore[operator]
                loss = F.cross_entropy(module(tokens).to(case.dtype), targets) / case.microbatches
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, whole(module) if step in (0, STEPS - 1) else {}))
    return found


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole parameters, by their names in the plain model."""
    return {
        name.removeprefix("module.").removeprefix("inner."): p.full_tensor() if isinstance(p, DTensor) else p.clone()
        for name, p in ((name, p.detach()) for name, p in module.named_parameters())
    }


def under_ddp(case: Case, group: dist.ProcessGroup) -> list[Snapshot]:
    """Train the reference, without activation checkpointing, because that changes no number."""
    model: nn.Module = model_of(replace(case, recompute=False))
    module = DistributedDataParallel(CastTo(model, torch.bfloat16) if case.mixed else model, process_group=group)
    return trained(case, module, dist.get_rank(group))


def under_fsdp(case: Case, group: dist.ProcessGroup, prepare: Callable[[nn.Module], object]) -> list[Snapshot]:
    """Train under FSDP2. ``prepare`` may change the sharded model before the training."""
    model, mesh = model_of(case), DeviceMesh.from_group(group, "cpu")
    policy = MixedPrecisionPolicy(*((torch.bfloat16, case.dtype) if case.mixed else ()))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=case.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    prepare(model)
    return trained(case, model, dist.get_rank(group), model.set_requires_gradient_sync)  # type: ignore[attr-defined]


def assert_equal(found: list[Snapshot], expected: list[Snapshot], rtol: float, what: str) -> None:
    """Compare the losses of every step, and the parameters. Errors are relative to the largest number of a tensor."""
    for step, ((loss, parameters), (its_loss, its_parameters)) in enumerate(zip(found, expected, strict=True)):
        assert parameters.keys() == its_parameters.keys(), what
        for name, one in {"loss": loss, **parameters}.items():
            other = its_loss if name == "loss" else its_parameters[name]
            difference, size = (one - other).abs().max().item(), other.abs().max().item()
            assert difference <= rtol * size, f"{what}: {name} after step {step + 1}: {difference:.1e} in {size:.1e}"
