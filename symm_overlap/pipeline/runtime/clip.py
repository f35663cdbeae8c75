"""Clip the gradients of a whole pipeline: each rank has only its own, and the norm is that of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ...runtime import are_enqueued
from .exchange import wait_for_all

FAILED = -math.inf
"""What a rank sends in place of its norm if it could not compute one."""


@torch.no_grad()
def clip_together(
    parameters: Sequence[nn.Parameter],
    counted: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Scale the gradients of all ranks of a pipeline by one factor. See `PipelineRuntime.clip_grad_norm_`.

    Args:
        parameters: those of this rank.
        counted: those of them that count in the norm: a tied parameter counts on one rank.
        group: the ranks of the pipeline.
        device: a device that the group can send from.
    """
    own, failure = torch.zeros((), dtype=torch.float64, device=device), None
    try:
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise ValueError(f"clip_grad_norm_: norm_type is {norm_type}: it must be above 0, or 'inf'")
        norms = [_norm(alike, norm_type, foreach).to(own) for alike in _alike(counted)]
        own = torch.linalg.vector_norm(torch.stack([own, *norms]), norm_type)
    except Exception as error:  # the peers wait for this rank, so they are told
        own, failure = torch.full_like(own, FAILED), error
    # Every rank computes with the norms of all, in their order, so that all get the same bits.
    every = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(every, own, group=group, async_op=True)
    wait_for_all(work, group, device, "clip_grad_norm_")
    if failure is not None:
        raise failure
    # On a GPU, a look at them would stop the host until they are there. The norm is infinite if a rank failed.
    if not are_enqueued(group, device) and (failed := [rank for rank, norm in enumerate(every) if norm == FAILED]):
        ranks = ", ".join(str(dist.get_global_rank(group, rank)) for rank in failed)
        raise RuntimeError(f"clip_grad_norm_: no gradient was clipped, because it failed on rank {ranks}")
    total: Tensor = torch.linalg.vector_norm(torch.stack(every), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients of all ranks is {total.item()}, so that they cannot be "
            "clipped; error_if_nonfinite=False scales them by it anyway"
        )
    for alike in _alike(parameters):
        clip_grads_with_norm_(alike, max_norm, total, foreach)
    return total


def _alike(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return those that have gradients, in lists of equal sharding: torch's functions for several gradients at once
    accept no DTensors of several meshes, and none beside tensors.
    """
    lists: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            sharding = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else grad.device
            lists.setdefault(sharding, []).append(parameter)
    return list(lists.values())


def _norm(parameters: Sequence[nn.Parameter], norm_type: float, foreach: bool | None) -> Tensor:
    norm = get_total_norm([each.grad for each in parameters if each.grad is not None], norm_type, foreach=foreach)
    whole: Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return whole
