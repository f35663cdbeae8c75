"""Tensors whose memory the peers can read, for inputs that need not be copied."""

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
    """An uninitialised tensor in symmetric memory of a group: ``torch.empty(*size, dtype=dtype, device=device)``, and
    the peers read it where it lies when an op gathers it, or a part of it. Any other input is first copied to where
    they can read it. Collective: every rank makes the same tensor.

    It is what ``torch.distributed._symmetric_memory.empty`` and ``rendezvous`` make, which the ops find on CPU too.
    Make it once and write to it before each call: a new one costs a meeting of the ranks. An op that gathers it returns
    when the peers have read it. Its rows must be contiguous along the gathered dimension, as for
    `symm_overlap.all_gather_matmul`; on CUDA a part of it must begin at the same element on every rank. Where peers
    cannot reach each other's memory, and in a group of one rank, it is an ordinary tensor.

    Args:
        size: the shape, as for ``torch.empty``: numbers, or one sequence of them; the same on every rank.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        dtype, device, requires_grad: as for ``torch.empty``; the device is a CPU or a GPU.

    Raises:
        ValueError, TypeError: bad arguments, before any communication.
        RuntimeError: ranks want different sizes; or there is no room, on this rank or on another; or a CUDA graph is
            being captured.
        torch.distributed.DistBackendError: a peer is dead, or did not come before the deadline.
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
    state.lane(of, place, settings.lane_index).workspace.require_preparable("empty() makes symmetric memory")
    if not direct_access(state, place, settings.comparing):
        return torch.empty(plain.shape, dtype=plain.dtype, device=place, requires_grad=requires_grad)
    return new_symmetric(state, of, plain.shape, plain.dtype, place).requires_grad_(requires_grad)
