"""Hooks on the gradient of a gathered input, which the gradients of the layers that share the gather do not pass.

A hook that is there before the layers are called is respected (``scales_the_gradient`` in test_sharing.py).
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap.nn import ColwiseParallel
from tests.nn.blocks import HIDDEN, WIDTH, whole
from tests.nn.reference import TORCH, mesh_of, values
from tests.ranks import Pool, Rank, RankError


class Hooked(nn.Module):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.a, self.late = nn.Linear(WIDTH, HIDDEN), late

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor | None = self.a(x) if self.late else None
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.1)
        return self.a(x) if y is None else y


def hooked(me: Rank, compile: bool) -> None:
    torch._dynamo.reset()
    module = parallelize_module(Hooked(not compile), mesh_of(me), {"": whole(0), "a": ColwiseParallel()})
    call = torch.compile(module, backend="aot_eager") if compile else module
    x = torch.ones(2, 4, WIDTH)
    call(x)
    call(x.requires_grad_() * 1)


class Retaining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x.retain_grad()
        self.inner = x
        y: Tensor = self.a(x)
        return y


def retained(me: Rank) -> None:
    plain = Retaining().double()
    module = parallelize_module(copy.deepcopy(plain), mesh_of(me), {"": whole(0), "a": ColwiseParallel()})
    x = values((2 * me.world, 4, WIDTH)).requires_grad_()
    plain(x * 1).sum().backward()
    module((x * 1).chunk(me.world)[me.rank]).sum().backward()
    torch.testing.assert_close(module.inner.grad, plain.inner.grad)


def test_a_gathered_input_may_retain_its_gradient(ranks: Pool) -> None:
    ranks.run(2, retained)


def test_a_hook_that_comes_too_late_is_an_error(ranks: Pool) -> None:
    with pytest.raises(RankError, match=r"after it has called one of them.*PrepareModuleInput\(linears=\(\)"):
        ranks.run(2, hooked, False)


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 runs such a module uncompiled")
def test_a_hook_in_compiled_code_is_an_error(ranks: Pool) -> None:
    with pytest.raises(RankError, match="on the gradient of the input that its linear layers share, in compiled code"):
        ranks.run(2, hooked, True, timeout=120)
