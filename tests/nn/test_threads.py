"""One parallel module in several threads."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import symm_overlap
from symm_overlap.nn import ColwiseParallel, SequenceParallel
from tests.nn.blocks import WIDTH
from tests.nn.blocks import whole as whole_input
from tests.nn.reference import mesh_of, values
from tests.nn.test_sharing import Three
from tests.ranks import Pool, Rank


def in_threads(me: Rank) -> None:
    """Threads take turns within the module's forward, where each finds the products of its own call."""
    torch.manual_seed(0)
    inside = threading.Barrier(3)
    column = ColwiseParallel()
    plan = {"": whole_input(1), "a": column, "b": column}
    whole = Three("no_gradient_through_one").double()
    module = parallelize_module(copy.deepcopy(whole), mesh_of(me), plan)
    inner = module.forward_of_prepared
    module.forward_of_prepared = lambda x: (inside.wait(20), inner(x))[1]

    def calls(lane: int) -> None:
        with symm_overlap.lane(lane), symm_overlap.timeout(20):
            for seed in range(10):
                x = values((2, 4, WIDTH), seed + 100 * lane).requires_grad_()
                mine = x.detach().chunk(me.world, 1)[me.rank].requires_grad_()
                (expected,) = torch.autograd.grad(whole(x).square().sum(), x)
                (found,) = torch.autograd.grad(module(mine).square().sum(), mine)
                torch.testing.assert_close(found, expected.chunk(me.world, 1)[me.rank])

    with ThreadPoolExecutor(3) as threads:
        for call in [threads.submit(calls, lane) for lane in range(3)]:
            call.result()


class Scale(nn.Module):
    """A norm that waits inside its forward, and keeps what it has computed last."""

    def __init__(self, inside: threading.Barrier) -> None:
        super().__init__()
        self.weight, self.inside = nn.Parameter(torch.arange(1.0, WIDTH + 1)), inside
        self.latest = torch.zeros(())

    def __deepcopy__(self, memo: object) -> Scale:
        return Scale(self.inside)

    def forward(self, x: Tensor) -> Tensor:
        self.inside.wait(20)
        y = x * self.weight
        self.inside.wait(20)
        self.latest = y.detach()
        return y


def evaluated_while_it_trains(me: Rank) -> None:
    norm = Scale(threading.Barrier(2))
    parallelize_module(norm, mesh_of(me), SequenceParallel(use_local_output=True))
    x = torch.ones(2, 4, WIDTH)

    def evaluate() -> Tensor:
        with torch.no_grad():
            return norm(2 * x)

    with ThreadPoolExecutor(1) as threads:
        evaluated = threads.submit(evaluate)
        y = norm(x)
        other = evaluated.result()
    assert y.requires_grad
    assert not other.requires_grad
    torch.testing.assert_close(2 * y, other)
    assert any(torch.equal(norm.latest, each) for each in (y, other))
    y.sum().backward()
    torch.testing.assert_close(norm.weight.grad.to_local(), torch.full((WIDTH,), 8.0 * me.world))
    assert isinstance(norm.weight, DTensor)


def test_a_norm_may_be_evaluated_while_it_trains(ranks: Pool) -> None:
    """Each thread has its own plain parameters in the norm: the gradient of the one that trains is not lost."""
    ranks.run(2, evaluated_while_it_trains)


def test_threads_may_share_a_module_if_each_has_a_lane(ranks: Pool) -> None:
    ranks.run(2, in_threads)
