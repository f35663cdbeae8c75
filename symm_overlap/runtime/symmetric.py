"""Symmetric memory: how large the half of a workspace is, how ranks agree that all have room, tensors of programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from .._torch import SymmetricMemory, symm_mem
from ._torch import rendezvous_name

if TYPE_CHECKING:
    from .group import GroupState

_T = TypeVar("_T")
_STEP = 1 << 20  # bytes of a half: small calls of different shapes share one; a GPU hands out 2 MiB at a time


def half_size(nbytes: int) -> int:
    """The size of a half that holds ``nbytes``, 1 or more: no more than that, in whole MiB.

    So a lane keeps at most twice what its largest call needs, and 2 MiB. A sequence of ever larger calls makes a new
    workspace at each new MiB, at which the ranks meet; `symm_overlap.prepare` makes the last one at once.
    """
    return -(-nbytes // _STEP) * _STEP


def new_symmetric(
    state: GroupState, group: dist.ProcessGroup, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Memory of this rank that the peers can read, where they have it themselves. Collective, with one size.

    Raises:
        RuntimeError: there is no room, on this rank or (`torch.distributed.DistBackendError`) on another.
        ValueError, RuntimeError: ranks want different sizes.
    """
    tensor = on_every_rank(
        lambda: symm_mem.empty(*size, dtype=dtype, device=device), group, f"symmetric tensors on {device.type}"
    )
    rendezvous(tensor, group)
    state.symmetric[tensor.untyped_storage()] = next(state.meetings)
    return tensor


def rendezvous(tensor: Tensor, group: dist.ProcessGroup) -> SymmetricMemory:
    """Let the ranks of ``group`` meet for symmetric memory, which they have each made: torch's ``rendezvous``, by ranks
    that may have met in other groups before, and in different numbers. The second time nobody is waited for.
    """
    return symm_mem.rendezvous(tensor, group.group_name if tensor.device.type == "cpu" else rendezvous_name(group))


def on_every_rank(make: Callable[[], _T], group: dist.ProcessGroup, tag: str) -> _T:
    """What ``make`` returns, if it succeeds on every rank of ``group``; otherwise all ranks raise. Collective among the
    calls with this ``tag``.

    Used before ranks meet on CUDA: those that came would wait for one that has no room until the store's time-out.

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
