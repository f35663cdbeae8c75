"""The environment of a pipelined model: a group of ranks, a device, autocast, gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ..generators import generate
from ..schedule import Schedule

Autocast = tuple[tuple[str, torch.dtype], ...]
"""For which devices autocast is enabled, in the order of their names, with its dtype."""


def autocast_state() -> Autocast:
    """Return for which devices autocast is enabled, with its dtype. It determines the dtypes in the code around layers
    and in messages."""
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )


def computes_gradients() -> bool:
    """True if operators compute gradients now, of tensors that require them."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def schedule_for(
    schedule: Schedule | str, microbatches: int, stages_per_rank: int | None, group: dist.ProcessGroup | None
) -> Schedule:
    """Return the schedule to run on a group.

    Raises:
        ValueError: there is no group, or the schedule is not for it.
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group: call torch.distributed.init_process_group first")
    ranks = dist.get_world_size(group)
    if isinstance(schedule, str):
        schedule = generate(schedule, ranks, microbatches, stages_per_rank)
    if schedule.ranks != ranks or schedule.microbatches != microbatches:
        raise ValueError(
            f"the schedule is for {schedule.ranks} ranks and {schedule.microbatches} microbatches, but there are "
            f"{ranks} and {microbatches}"
        )
    if schedule.pipelines > 1:
        raise ValueError("a schedule with microbatches from both ends needs each layer twice: use DualPipeV")
    return schedule


def device_of(model: nn.Module, wanted: torch.device | None) -> torch.device:
    """Return where the parameters of a model will be.

    Raises:
        ValueError: they are on several devices.
    """
    if wanted is not None:
        return wanted
    real = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    if len(real) > 1:
        raise ValueError(f"the model has parameters on {', '.join(sorted(map(str, real)))}: give device=")
    return real.pop() if real else torch.get_default_device()
