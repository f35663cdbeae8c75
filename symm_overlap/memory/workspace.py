"""Symmetric memory for one lane, whatever other threads of the ranks allocate meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from .._torch import SymmetricMemory, symm_mem


def allocate(nbytes: int, device: torch.device, group: dist.ProcessGroup, tag: str) -> tuple[Tensor, SymmetricMemory]:
    """``nbytes`` of symmetric memory of ``group``, and its handle. Collective among the calls with this ``tag``.

    torch's own ``rendezvous`` goes by the order of calls in a group: of two threads that allocate at the same time, in
    another order on another rank, each would get memory of the other one's peer. On CPU the tag keeps them apart. A
    rank that has no room tells its peers, who would wait for it.

    Raises:
        RuntimeError: there is no room for it, on this rank or (`torch.distributed.DistBackendError`) on another.
    """

    def room() -> Tensor:
        if device.type == "cuda":
            # What the lane has had goes once every rank is at the rendezvous: by then none has a kernel that uses it.
            torch.cuda.synchronize(device)
        tensor: Tensor = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        return tensor

    if device.type == "cuda":
        tensor = on_every_rank(room, group, tag)
        return tensor, symm_mem.rendezvous(tensor, group)
    try:
        tensor = room()
    except RuntimeError as error:
        _C.refuse_rendezvous(group.group_name, tag, str(error))
        raise
    _C.rendezvous(tensor, group.group_name, tag)
    return tensor, symm_mem.rendezvous(tensor, group)


def on_every_rank(make: Callable[[], Tensor], group: dist.ProcessGroup, tag: str) -> Tensor:
    """What ``make`` returns, if it does so on every rank of ``group``; else all raise. Collective, as `allocate`.

    Before a rendezvous on CUDA. torch counts the rendezvous of a process in all its groups (pytorch issue 196082): one
    to which only some of the ranks come would leave them with different counts, and every later one would hang.

    Raises:
        Exception: what ``make`` raised on this rank.
        torch.distributed.DistBackendError: it failed on another rank, or a rank has died or did not come in time.
    """
    try:
        made = make()
    except Exception as error:
        _C.exchange(group.group_name, "rendezvous", f"{type(error).__name__}: {error}", tag)
        raise
    for rank, failure in enumerate(_C.exchange(group.group_name, "rendezvous", "", tag)):
        if failure:
            raise dist.DistBackendError(
                f"symm_overlap: rendezvous of group {group.group_name!r}: rank {rank} failed: {failure}"
            )
    return made
