"""Tensors whose memory the peers can read, for inputs that do not have to be copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch import resolve_group
from ..runtime import TRAITS, backend_of, direct_access, new_symmetric, state_of
from ..settings import current
from .arguments import Group, group_name


def empty(
    *size: int | Sequence[int],
    group: Group,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return an uninitialised tensor in symmetric memory of a group, which its peers can read.

    Equivalent to ``torch.empty(*size, dtype=dtype, device=device)``. If an op gathers the tensor, or a part of it, the
    peers read it in place. Any other input is first copied to memory that they can read. Collective: every rank must
    create the same tensor.

    Create the tensor once and write to it before each call, because all ranks have to meet for a new one. An op that
    gathers it returns when the peers have read it. As for `symm_overlap.all_gather_matmul`, its rows must be contiguous
    along the gathered dimension. On CUDA a part of it must begin at the same element on every rank. The result is an
    ordinary tensor if the group has one rank, or if peers cannot reach each other's memory.

    ``torch.distributed._symmetric_memory.empty`` and ``rendezvous`` create the same kind of tensor. On CPU the ops
    recognise those tensors too. On CUDA they recognise only tensors that this function returned.

    Args:
        size: the shape, as for ``torch.empty``: numbers, or one sequence of numbers; the same on every rank.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        dtype, device, requires_grad: as for ``torch.empty``; the device is a CPU or a GPU.

    Returns:
        A contiguous tensor of this shape, dtype and device.

    Raises:
        ValueError, TypeError: an argument is invalid. Raised before any communication.
        ValueError: ranks pass different sizes, on CPU (on GPUs RuntimeError).
        RuntimeError: there is not enough memory on this rank or on another; or a CUDA graph is being captured; or this
            process was forked from the rank.
        torch.distributed.DistBackendError: a peer is dead, or did not arrive before the deadline.
    """
    plain = torch.empty(*size, dtype=dtype, device="meta")  # type: ignore[arg-type]
    place = torch.get_default_device() if device is None else torch.device(device)
    if place.type not in TRAITS:
        raise ValueError(f"empty: device is {str(place)!r}: allowed are {', '.join(TRAITS)}")
    of = resolve_group(group_name(group))
    state, settings = state_of(of), current()
    if state.alone or settings.needs is not None:
        return torch.empty(plain.shape, dtype=plain.dtype, device=place, requires_grad=requires_grad)
    place = backend_of(place.type).resolve(place)
    lane = state.lane(of, place, settings.lane_index)
    lane.require_own_process()
    lane.workspace.require_preparable("empty() makes symmetric memory")
    if not direct_access(state, place, settings.comparing):
        return torch.empty(plain.shape, dtype=plain.dtype, device=place, requires_grad=requires_grad)
    return new_symmetric(state, of, plain.shape, plain.dtype, place).requires_grad_(requires_grad)
