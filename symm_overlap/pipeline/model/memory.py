"""Which parameters and buffers of a model share memory, under whatever names."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class _Memory(NamedTuple):
    """A range of bytes, from ``start`` to ``stop`` of a storage."""

    storage: int
    start: int
    stop: int


def sharing(model: nn.Module) -> dict[str, set[str]]:
    """Return, for each name of a parameter or a buffer, all names of tensors that have bytes in common with it."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    memory = {name: _of(tensor) for name, tensor in named}
    in_order = sorted(memory, key=memory.__getitem__)
    found = {name: {name} for name in memory}
    for place, name in enumerate(in_order, 1):
        mine = memory[name]
        for other in islice(in_order, place, None):
            theirs = memory[other]
            if theirs.storage != mine.storage or theirs.start >= mine.stop:
                break
            found[name].add(other)
            found[other].add(name)
    return found


def _of(tensor: Tensor) -> _Memory:
    if is_lazy(tensor) or tensor.layout != torch.strided:
        return _Memory(id(tensor), 0, 1)
    size, start = tensor.element_size(), int(tensor.storage_offset())
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = last + 1 if tensor.numel() else 0
    return _Memory(tensor.untyped_storage()._cdata, start * size, (start + count) * size)
