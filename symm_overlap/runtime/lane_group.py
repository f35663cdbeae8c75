"""A process group for each lane, for the collectives of torch.distributed that a lane calls.

The collectives of one group pair up by the order of calls, which threads on several lanes do not keep: rank 0's lane 1
would exchange data with rank 1's lane 2, or gloo would end the process because sizes differ.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from .._torch import gloo_group
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
