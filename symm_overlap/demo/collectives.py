"""The model's two fused operations, once with overlap and once without.

``Overlap`` calls this package's ops. ``Plain`` does what a program without them does: it waits for the whole collective
and then computes one matmul, or the other way round. Both compute the same values and the same gradients, so
`symm-overlap train --compare` can compare one with the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import symm_overlap
from symm_overlap._torch import all_gather_single, reduce_scatter_single


class Overlap:
    """The collective matmuls of this package over ``group``."""

    name = "overlap"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def all_gather_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        _, outputs = symm_overlap.all_gather_matmul(x, list(weights), 0, self.group, return_A=False)
        return outputs

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        return symm_overlap.matmul_reduce_scatter(x, weight, "sum", 0, self.group)


class Plain:
    """A collective of ``torch.distributed`` before or after one ``torch.matmul``, without overlap."""

    name = "plain"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def all_gather_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        gathered: Tensor = _Gather.apply(x, self.group)  # type: ignore[no-untyped-call]
        return [gathered @ weight for weight in weights]

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        part: Tensor = _Scatter.apply(x @ weight, self.group)  # type: ignore[no-untyped-call]
        return part


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ``torch.cat`` of every rank's ``x`` along dimension 0."""
    x = x.contiguous()
    gathered = x.new_empty(x.size(0) * dist.get_world_size(group), *x.shape[1:])
    all_gather_single(gathered, x, group=group)
    return gathered


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum every rank's ``x`` and return this rank's part of the sum along dimension 0."""
    x = x.contiguous()
    part = x.new_empty(x.size(0) // dist.get_world_size(group), *x.shape[1:])
    reduce_scatter_single(part, x, group=group)
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather(grads[0], ctx.group), None
