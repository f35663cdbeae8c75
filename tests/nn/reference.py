"""Compare a parallel model with the same model on one rank, in float64: output, loss, and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tests.ranks import Rank

WORLDS = (1, 2, 4)
WHOLE = Replicate()
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_strided_shards = pytest.mark.skipif(
    TORCH < (2, 13), reason="torch 2.11 cannot gather the DTensor of a layer with several outputs"
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def mesh_of(me: Rank) -> DeviceMesh:
    return DeviceMesh.from_group(me.group, "cpu")


def part(me: Rank, whole: Tensor, layout: Placement) -> Tensor:
    """Return this rank's part of a tensor."""
    return whole.chunk(me.world, layout.dim)[me.rank] if isinstance(layout, Shard) else whole


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def values(shape: tuple[int, ...], seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weighted(y: Tensor, weights: Tensor) -> Tensor:
    """Return a loss in which every element of the output has its own weight."""
    return (y * weights).sum()


def gradients(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the gathered gradient of every parameter. This communicates, so every rank must consume all of them."""
    for name, parameter in module.named_parameters():
        yield name, None if parameter.grad is None else full(parameter.grad).detach()


def same_gradients(module: nn.Module, whole: nn.Module, **tolerance: float) -> None:
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    found = dict(gradients(module))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:  # torch 2.11 returns zeros instead if a DTensor's local part is used
            assert found[name] is None or (TORCH < (2, 13) and not found[name].count_nonzero()), name
        else:
            torch.testing.assert_close(
                found[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **tolerance
            )


def equals_whole(
    me: Rank,
    whole: nn.Module,
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module],
    x: Tensor,
    input: Placement = WHOLE,
    output: Placement = WHOLE,
    call: Callable[[nn.Module, Tensor], Any] = lambda module, x: module(x),
    times: int = 2,
) -> nn.Module:
    """Check that the parallel model computes the same as the whole model, also when gradients accumulate over calls."""
    module = parallelize(copy.deepcopy(whole), mesh_of(me))
    for _ in range(times):
        everything, mine = x.clone().requires_grad_(), part(me, x, input).clone().requires_grad_()
        expected = call(whole, everything)
        weights = values(tuple(expected.shape), 9)
        weighted(expected, weights).backward()
        found = call(module, mine)
        local = found.to_local() if isinstance(found, DTensor) else found
        torch.testing.assert_close(local, part(me, expected, output), **EXACT)
        weighted(local, part(me, weights, output)).backward()
        torch.testing.assert_close(mine.grad, part(me, everything.grad, input), **EXACT)
        same_gradients(module, whole, **EXACT)
    return module
