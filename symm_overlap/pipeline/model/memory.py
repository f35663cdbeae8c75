"""Which parameters and buffers of a model share memory, under whatever names."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class Memory(NamedTuple):
    """A range of bytes.

    Attributes:
        storage: which storage they are in.
        start, stop: where they begin and end in it.
    """

    storage: int
    start: int
    stop: int

    def overlaps(self, other: Memory) -> bool:
        """True if the two have bytes in common."""
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop


def memory_of(model: nn.Module) -> dict[str, Memory]:
    """Return the memory of all parameters and buffers, under each of their names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: _of(tensor) for name, tensor in named}


def _of(tensor: Tensor) -> Memory:
    if is_lazy(tensor) or tensor.layout != torch.strided:
        return Memory(id(tensor), 0, 1)
    size, start = tensor.element_size(), int(tensor.storage_offset())
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = last + 1 if tensor.numel() else 0
    return Memory(tensor.untyped_storage()._cdata, start * size, (start + count) * size)
