"""Tensors in symmetric memory, for the rows that need peers to see a buffer of the benchmark's own."""

from __future__ import annotations

import torch

from bench.harness.launch import Rank
from bench.methods.method import NotAvailableError


def symmetric_empty(rank: Rank, *shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A tensor in symmetric memory and, by rank, every rank's copy of it as this rank sees it."""
    import symm_overlap  # noqa: F401  (registers symmetric memory for CPU)

    try:
        from symm_overlap._torch import symm_mem
    except ImportError as error:
        raise NotAvailableError(f"no symmetric memory in this checkout: {error}") from None
    tensor = symm_mem.empty(*shape, dtype=dtype, device=rank.device)
    handle = symm_mem.rendezvous(tensor, rank.group_name)
    if handle is None:
        raise NotAvailableError(f"no symmetric memory between {rank.world} ranks on {rank.device.type}")
    return tensor, [handle.get_buffer(peer, list(shape), dtype) for peer in range(rank.world)]
