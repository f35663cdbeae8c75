"""Symmetric memory: the halves of a workspace, allocation that succeeds on all ranks or fails on all, and the
symmetric tensors of programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from .._torch import SymmetricMemory, symm_mem
from ._torch import rendezvous_name
from .call_lock import CallLock
from .lasting_memory import lasting

if TYPE_CHECKING:
    from .group import GroupState

_T = TypeVar("_T")
_one_rendezvous = CallLock("a rendezvous for symmetric memory", "let the handler use lanes that have made calls before")
"""torch exchanges the handles of CUDA memory over one socket a process."""
_met: WeakKeyDictionary[torch.UntypedStorage, WeakKeyDictionary[dist.ProcessGroup, SymmetricMemory]]
_met = WeakKeyDictionary()
"""For memory on a GPU, the groups whose ranks have met for it."""
_STEP = 1 << 20  # bytes of a half: small calls of different shapes share one; a GPU hands out 2 MiB at a time


def half_size(nbytes: int) -> int:
    """Return the size of a half that holds ``nbytes`` (1 or more): ``nbytes`` rounded up to whole MiB.

    So a lane keeps at most 2 MiB more than twice what its largest call needs. A sequence of ever larger calls allocates
    a new workspace, for which the ranks meet, each time it passes a whole MiB. `symm_overlap.prepare` allocates the
    largest one at once.
    """
    return -(-nbytes // _STEP) * _STEP


def place_in_half(half: int, parity: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return where a tensor lies in a workspace, in bytes from its begin.

    Args:
        half: the size of a half, in bytes.
        parity: in which half it lies, 0 or 1.
        offset: where it lies in this half, in bytes.

    Raises:
        IndexError: it would end beyond the half.
    """
    if offset + prod(shape) * dtype.itemsize > half:
        raise IndexError(f"{tuple(shape)} of {dtype} at byte {offset} does not fit a workspace of {half} bytes")
    return parity * half + offset


def new_symmetric(
    state: GroupState, group: dist.ProcessGroup, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return new memory of this rank that the peers can read. Every rank gets its own. Collective.

    Without symmetric memory, this would be ``torch.empty(size, dtype=dtype, device=device)``.

    Args:
        size: the shape, the same on every rank.
        dtype, device: of the tensor.

    Raises:
        RuntimeError: there is not enough memory, on this rank or (`torch.distributed.DistBackendError`) on another.
        ValueError, RuntimeError: ranks asked for different sizes.
    """
    tensor = on_every_rank(
        lambda: symm_mem.empty(*size, dtype=dtype, device=device), group, f"symmetric tensors on {device.type}"
    )
    rendezvous(tensor, group)
    state.symmetric[tensor.untyped_storage()] = next(state.rendezvous_numbers)
    return tensor


def rendezvous(tensor: Tensor, group: dist.ProcessGroup) -> SymmetricMemory:
    """Let the ranks of ``group`` meet for symmetric memory that each of them has allocated. This is torch's
    ``rendezvous``, for ranks that may have met in other groups before, some more often than others. A second call for
    the same memory waits for no peer, and takes no longer than a look into a table: gathers call this for each shard
    that they read in place.
    """
    if tensor.device.type == "cpu":
        return symm_mem.rendezvous(tensor, group.group_name)
    groups = _met.setdefault(tensor.untyped_storage(), WeakKeyDictionary())
    known = groups.get(group)
    if known is not None:
        return known
    with _one_rendezvous:
        name = rendezvous_name(group)
        # torch keeps a table of the peers' addresses on the device, in memory of its caching allocator.
        groups[group] = lasting(lambda: symm_mem.rendezvous(tensor, name), tensor.device)
    return groups[group]


def on_every_rank(make: Callable[[], _T], group: dist.ProcessGroup, tag: str) -> _T:
    """Return what ``make`` returns, if it succeeds on every rank of ``group``; otherwise all ranks raise. Collective
    among the calls with this ``tag``.

    This is used before a rendezvous on CUDA. Otherwise the ranks that came would wait until the store's time-out for a
    rank that failed to allocate.

    Raises:
        Exception: what ``make`` raised on this rank.
        torch.distributed.DistBackendError: ``make`` failed on another rank, or a rank died or did not come in time.
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
