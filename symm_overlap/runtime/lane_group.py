"""A process group for each lane, for the collectives of torch.distributed that a lane calls.

The collectives of one group pair up by the order of calls, which threads on several lanes do not keep: rank 0's lane 1
would exchange data with rank 1's lane 2, or gloo would end the process because sizes differ.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from .._torch import device_types_of, gloo_group
from .group import GroupState


def lane_group(state: GroupState, group: dist.ProcessGroup, lane: int, seconds: float) -> dist.ProcessGroup:
    """The group whose collectives lane ``lane`` of ``group`` uses; collective at the lane's first call.

    Lane 0 uses ``group`` itself. There are no others on CUDA.
    """
    if lane == 0:
        return group
    known = state.c10d.get(lane)
    if known is None:  # one lane is one thread's at a time: nobody else makes this group now
        known = gloo_group(group, f"symm_overlap/{group.group_name}/lane {lane}", timedelta(seconds=seconds))
        state.c10d[lane] = known
    return known


def message_group(state: GroupState, group: dist.ProcessGroup, lane: int, seconds: float) -> dist.ProcessGroup:
    """The group whose point-to-point messages lane ``lane`` uses: the lane's own, unless ``group`` is not on gloo.

    A group of the lane's own has its deadline, and its messages do not mix with others of the caller.
    """
    return lane_group(state, group, lane, seconds) if dist.get_backend(group) == "gloo" else group


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where tensors of ``device`` must lie for the group to send them: there, or on the CPU (gloo beside a GPU)."""
    return device if device.type in device_types_of(group) else torch.device("cpu")
