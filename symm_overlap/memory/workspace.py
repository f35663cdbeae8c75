"""Symmetric memory for one lane, whatever other threads of the ranks allocate meanwhile."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from .._torch import SymmetricMemory, symm_mem


def allocate(nbytes: int, device: torch.device, group: dist.ProcessGroup, tag: str) -> tuple[Tensor, SymmetricMemory]:
    """``nbytes`` of symmetric memory of ``group``, and its handle. Collective among the calls with this ``tag``.

    torch's own ``rendezvous`` goes by the order of calls in a group: of two threads that allocate at the same time, in
    another order on another rank, each would get memory of the other one's peer. On CPU the tag keeps them apart, and a
    rank that has no room tells its peers, who would wait for it.

    Raises:
        RuntimeError: there is no room for it, on this rank or (`torch.distributed.DistBackendError`) on another.
    """
    try:
        tensor = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if device.type == "cpu":
            _C.refuse_rendezvous(group.group_name, tag, str(error))
        raise
    if device.type == "cpu":
        _C.rendezvous(tensor, group.group_name, tag)
    return tensor, symm_mem.rendezvous(tensor, group)
