"""Tensors in symmetric memory, for benchmarks that share a buffer of their own with peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import symm_overlap  # noqa: F401  (registers symmetric memory for CPU)
from bench.harness import NotAvailableError
from bench.harness.launch import Rank


@dataclass(frozen=True)
class Symmetric:
    """A tensor in symmetric memory, torch's handle for it, and `peers`: this rank's views of every rank's tensor.

    Keep the whole object alive, because the views in `peers` do not keep the memory mapped.
    """

    tensor: torch.Tensor
    handle: Any
    peers: tuple[torch.Tensor, ...]


def symmetric_empty(rank: Rank, *shape: int, dtype: torch.dtype) -> Symmetric:
    """Allocate a tensor in symmetric memory of the rank's group. Every rank must call this with the same arguments."""
    try:
        from symm_overlap._torch import symm_mem
    except ImportError as error:
        raise NotAvailableError(f"no symmetric memory in this checkout: {error}") from None
    tensor = symm_mem.empty(*shape, dtype=dtype, device=rank.device)
    handle = symm_mem.rendezvous(tensor, rank.group)
    if handle is None:
        raise NotAvailableError(f"no symmetric memory between {rank.world} ranks on {rank.device.type}")
    peers = tuple(handle.get_buffer(peer, list(shape), dtype) for peer in range(rank.world))
    return Symmetric(tensor, handle, peers)
