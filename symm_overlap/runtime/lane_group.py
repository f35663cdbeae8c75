"""A process group for each lane, for the collectives of torch.distributed that the lane calls.

The collectives of one group are matched by the order of calls. Threads on several lanes do not call in the same order
on every rank, so with one group, rank 0's lane 1 would exchange data with rank 1's lane 2, or gloo would end the
process because sizes differ.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from .._torch import device_types_of, gloo_group
from .group import GroupState


def lane_group(state: GroupState, group: dist.ProcessGroup, lane: int, seconds: float) -> dist.ProcessGroup:
    """Return the group whose collectives lane ``lane`` of ``group`` uses. The lane's first call of this is collective.

    Lane 0 uses ``group`` itself. On CUDA, the other lanes do not call the collectives of torch.distributed.
    """
    if lane == 0:
        return group
    known = state.lane_groups.get(lane)
    if known is None:  # one thread at a time uses a lane, so no other thread creates this group now
        known = gloo_group(group, f"symm_overlap/{group.group_name}/lane {lane}", timedelta(seconds=seconds))
        state.lane_groups[lane] = known
    return known


def message_group(state: GroupState, group: dist.ProcessGroup, lane: int, seconds: float) -> dist.ProcessGroup:
    """Return the group for the point-to-point messages of lane ``lane``: the lane's group of gloo if ``group`` is on
    gloo, or if it carries out all messages of a rank one after another. Otherwise ``group``.

    A group of the lane has the lane's deadline, and its messages do not mix with other messages of the caller.
    """
    if dist.get_backend(group) != "gloo" and not _has_one_queue(group):
        return group
    return lane_group(state, group, lane, seconds)


def _has_one_queue(group: dist.ProcessGroup) -> bool:
    """True if all messages of a rank are in one queue: NCCL has only one communicator for the whole group if
    ``init_process_group`` was called with ``device_id``. A message to one rank then waits for one to another rank.
    """
    groups = (group, dist.group.WORLD)
    return any(getattr(each, "bound_device_id", None) is not None for each in groups)


def are_enqueued(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if the group enqueues messages from ``device`` on a stream, as NCCL does, so that the host does not have to
    wait for them. The first message from one rank to another makes the connection, and then the host does wait.
    """
    return wire_device(group, device).type != "cpu"


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device on which tensors of ``device`` must be stored for the group to send them. It is ``device``
    itself, or the CPU for a group that cannot send from ``device`` (gloo with tensors on a GPU).
    """
    return device if device.type in device_types_of(group) else torch.device("cpu")
