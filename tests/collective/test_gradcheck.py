"""In float64, gradients equal those of numerical differentiation. Each rank in turn probes its own inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.collective.gradient_cases import CASES, F64, loss_of
from tests.quick import one_in
from tests.ranks import Pool, Rank


class _TotalLoss(torch.autograd.Function):
    """The sum of all ranks' losses, on the rank that runs gradcheck. The other ranks follow its commands."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, command: Callable[[int], None]) -> Tensor:
        ctx.command = command
        total = loss.detach().clone()
        dist.all_reduce(total, group=ctx.command.group)  # type: ignore[attr-defined]
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.command(2)
        dist.broadcast(grad.clone(), ctx.command.prober, group=ctx.command.group)
        return grad, None


class _Command:
    """A number that the probing rank broadcasts. 0: stop, 1: run the op forward, 2: run it backward."""

    def __init__(self, me: Rank, prober: int) -> None:
        self.group, self.prober = me.group, prober

    def __call__(self, number: int) -> int:
        word = torch.tensor(number)
        dist.broadcast(word, self.prober, group=self.group)
        return int(word)


def gradcheck_from_each_rank(me: Rank, number: int) -> None:
    case = CASES[number]
    for prober in range(me.world):
        command = _Command(me, prober)
        mine = case.inputs(me.rank, me.world)

        def forward(*inputs: Tensor, command: _Command = command) -> Tensor:
            return _TotalLoss.apply(loss_of(case.run(list(inputs), me), seed=7 * me.rank), command)

        if me.rank == prober:

            def probe(*inputs: Tensor, command: _Command = command, forward: Any = forward) -> Tensor:
                command(1)
                return forward(*inputs)

            assert torch.autograd.gradcheck(probe, tuple(mine), fast_mode=True, check_undefined_grad=False)
            command(0)
            continue
        while order := command(-1):
            if order == 1:
                loss = loss_of(case.run(mine, me), seed=7 * me.rank)
                dist.all_reduce(loss.detach().clone(), group=me.group)
            else:
                grad = torch.empty((), dtype=F64)
                dist.broadcast(grad, prober, group=me.group)
                torch.autograd.grad(loss, mine, grad, retain_graph=True)


@pytest.mark.parametrize("number", one_in(2, range(len(CASES))), ids=[str(case) for case in CASES])
def test_gradcheck_in_float64_from_each_rank(ranks: Pool, number: int) -> None:
    ranks.run(2, gradcheck_from_each_rank, number)
