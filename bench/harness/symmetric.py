"""Tensors in symmetric memory, where a benchmark needs peers to see a buffer of its own."""

from __future__ import annotations

from typing import Any

import torch

import symm_overlap  # noqa: F401  (registers symmetric memory for CPU)
from bench.harness import NotAvailableError
from bench.harness.launch import Rank


def symmetric_empty(rank: Rank, *shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """A tensor in symmetric memory, torch's handle of it and, by rank, every rank's tensor as this rank sees it."""
    try:
        from symm_overlap._torch import symm_mem
    except ImportError as error:
        raise NotAvailableError(f"no symmetric memory in this checkout: {error}") from None
    tensor = symm_mem.empty(*shape, dtype=dtype, device=rank.device)
    handle = symm_mem.rendezvous(tensor, rank.group)
    if handle is None:
        raise NotAvailableError(f"no symmetric memory between {rank.world} ranks on {rank.device.type}")
    return tensor, handle, [handle.get_buffer(peer, list(shape), dtype) for peer in range(rank.world)]
