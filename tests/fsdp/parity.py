"""Train one model twice: unchanged, with gradients averaged as in DDP, and with its linear layers sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from symm_overlap.fsdp import ShardedLinear, shard_linears
from tests.collective import reference as ref
from tests.ranks import Rank

F64 = torch.float64
Step = Callable[[nn.Module, int], Tensor]


class Block(nn.Module):
    """Layers that three ranks cannot share evenly. One is used twice, one is frozen, and two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up, self.twice, self.down = nn.Linear(8, 10), nn.Linear(10, 10, bias=False), nn.Linear(10, 7)
        self.frozen, self.tied, self.other = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.other.weight = self.tied.weight
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(7)

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.embed(tokens)))
        h = self.down(torch.tanh(self.twice(torch.tanh(self.twice(h)))))
        return self.norm(self.other(torch.tanh(self.tied(self.frozen(h)))))


def block() -> Block:
    torch.manual_seed(5)
    return Block().to(F64)


def tokens(me: Rank, step: int, rows: int) -> Tensor:
    return torch.randint(0, 11, (rows, 3), generator=torch.Generator().manual_seed(100 * step + me.rank))


def average_gradients(me: Rank, parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients of the parameters that are not sharded, as DDP does."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor) and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=me.group)
            parameter.grad /= me.world


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def same_gradients(plain: nn.Module, sharded: nn.Module, atol: float = 1e-12) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        grad = expected[name].grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None:
            torch.testing.assert_close(whole(parameter.grad), grad, rtol=1e-12, atol=atol, msg=name)


def same_parameters(plain: nn.Module, sharded: nn.Module, atol: float = 1e-10) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(whole(parameter), expected[name].detach(), rtol=1e-10, atol=atol, msg=name)


def pair(me: Rank, shard_dim: int) -> tuple[Block, Block]:
    """Return the plain model and the sharded one."""
    plain, sharded = block(), block()
    done = shard_linears(sharded, me.group, shard_dim=shard_dim)
    assert done.sharded == ["up", "twice", "down", "frozen", "tied", "other"]
    assert not done.left
    assert all(isinstance(getattr(sharded, name), ShardedLinear) for name in done.sharded)
    return plain, sharded


def targets(me: Rank, step: int, rows: int) -> Tensor:
    return ref.normal((rows, 3, 7), F64, seed=1000 * step + me.rank)
