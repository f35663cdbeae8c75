"""Models for tests of FSDP2, and functions that train them with and without our communication and compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import symm_overlap.fsdp
from tests.ranks import Rank

WIDTH = 7


class Block(nn.Module):
    """Linear layers whose width of 7 no tested world size divides."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def model(dtype: torch.dtype = torch.float64, layers: int = 4) -> nn.Sequential:
    """Return the same model on every rank. It has blocks of different sizes, and a layer that belongs to the root."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(5 + 6 * layer) for layer in range(layers)), nn.Linear(WIDTH, 3)).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the batch of a rank in a step."""
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype)


def sharded(me: Rank, made: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Apply ``fully_shard`` to every block of ``made`` and to ``made`` itself, and return it."""
    mesh = DeviceMesh.from_group(me.group, "cpu") if mesh is None else mesh
    for block in made.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh, **options)
    fully_shard(made, mesh=mesh, **options)
    return made


def blocks(made: nn.Module) -> list[FSDPModule]:
    """Return the sharded blocks of a model, in order."""
    return [block for block in made.modules() if isinstance(block, Block) and isinstance(block, FSDPModule)]


def train(me: Rank, made: nn.Module, step: Callable[[nn.Module, int], Tensor], steps: int = 4) -> list[Tensor]:
    """Train some steps with SGD. Return the losses, followed by the parameters."""
    optimizer = torch.optim.SGD([each for each in made.parameters() if each.requires_grad], lr=0.1)
    found: list[Tensor] = []
    for index in range(steps):
        found.append(step(made, index).detach())
        optimizer.step()
        optimizer.zero_grad()
    return found + [each.full_tensor().detach() for each in made.parameters()]  # type: ignore[attr-defined]


def loss_of(me: Rank, made: nn.Module, index: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the loss of this rank's batch, after its backward pass."""
    loss: Tensor = made(batch(index, me.rank, dtype)).double().square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def reference(me: Rank, steps: int = 4) -> list[Tensor]:
    """Return what `train` must return, from plain training on the mean of all ranks' gradients, as in DDP."""
    whole = copy.deepcopy(model())
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    found = []
    for index in range(steps):
        losses = [whole(batch(index, rank)).square().sum() for rank in range(me.world)]
        (sum(losses) / me.world).backward()
        found.append(losses[me.rank].detach())
        optimizer.step()
        optimizer.zero_grad()
    return found + [each.detach() for each in whole.parameters()]


def with_and_without(
    me: Rank, make: Callable[[], nn.Module], step: Callable[[nn.Module, int], Tensor], error: float = 1e-7
) -> nn.Module:
    """Require that training is the same with our communication as with torch's; return the model that had ours.

    Args:
        error: the allowed difference, because gloo adds in another order or in lower precision.
    """
    wanted = train(me, make(), step)
    ours = make()
    symm_overlap.fsdp.apply(ours)
    found = train(me, ours, step)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=error, atol=error)
    return ours


def premultiplied_sum(factor: float) -> Any:
    """Return the reduction that FSDP2 uses for the sum of inputs that every rank has multiplied by ``factor``."""
    op: Any = dist.ReduceOp.PREMUL_SUM
    return op(factor) if callable(op) else dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined] # torch 2.11
