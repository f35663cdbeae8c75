"""A process group for each lane, for the collectives of torch.distributed that a lane calls.

The collectives of one group pair up by the order of calls, which threads on several lanes do not keep: rank 0's lane 1
would exchange data with rank 1's lane 2, or gloo would end the process because sizes differ.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .._torch import gloo_group
from .timeouts import timeout_ms

_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()
_lock = threading.Lock()


def lane_group(group: dist.ProcessGroup, lane: int) -> dist.ProcessGroup:
    """The group whose collectives lane ``lane`` of ``group`` uses; collective at the lane's first call.

    Lane 0 uses ``group`` itself. There are no others on CUDA.
    """
    if lane == 0:
        return group
    with _lock:
        known = _groups.setdefault(group, {}).get(lane)
    if known is None:  # one lane is one thread's at a time: nobody else makes this group now
        known = gloo_group(group, f"symm_overlap/{group.group_name}/lane {lane}", timedelta(milliseconds=timeout_ms()))
        with _lock:
            _groups[group][lane] = known
    return known
