"""The workspaces of all ranks in the memory of one process, with the interface of torch's symmetric memory handle."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class PhantomMemory:
    """A symmetric memory handle for rank 0 and peers that are only memory, as far as workspaces use such a handle.

    Args:
        nbytes: the size of each rank's memory.
        on_host: whether the memory of the phantoms is pinned host memory.

    Attributes:
        rank, world_size: as in torch's handle.
        ranks: the memory of each rank, as bytes. At first all bits are set, so every float is NaN until it is written.
    """

    rank = 0

    def __init__(self, world: int, nbytes: int, device: torch.device, on_host: bool = False) -> None:
        self.world_size = world
        pinned = on_host and device.type == "cuda"
        kept = torch.device("cpu") if pinned else device
        self.ranks = [torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)]
        for _ in range(world - 1):
            self.ranks.append(torch.empty(nbytes, dtype=torch.uint8, device=kept, pin_memory=pinned).fill_(0xFF))
        self._extents = [(memory.data_ptr(), memory.data_ptr() + nbytes) for memory in self.ranks[1:]]

    def get_buffer(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """See torch's ``_SymmetricMemory.get_buffer``."""
        begin, nbytes = offset * dtype.itemsize, prod(shape) * dtype.itemsize
        memory = self.ranks[rank]
        if begin + nbytes > memory.nbytes:
            raise RuntimeError(f"{tuple(shape)} of {dtype} at element {offset} is not within {memory.nbytes} bytes")
        return memory[begin : begin + nbytes].view(dtype).view(*shape)

    def is_phantom(self, address: int) -> bool:
        """True if an address is in the memory of a peer."""
        return any(begin <= address < end for begin, end in self._extents)
