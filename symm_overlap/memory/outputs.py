"""Memory for the outputs of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C

_LARGE = 8 << 20
"""Bytes from which malloc is likely to take fresh pages for a tensor, each of which is a fault at its first write."""


def new_output(like: Tensor, *shape: int) -> Tensor:
    """An uninitialised contiguous tensor with the dtype and device of ``like``.

    A large one on CPU asks for large pages: with pages of 4 KiB the faults of a gathered tensor of 32 MiB take several
    times as long as copying it.
    """
    output = torch.empty(shape, dtype=like.dtype, device=like.device)
    nbytes = output.numel() * output.element_size()
    if output.device.type == "cpu" and nbytes >= _LARGE:
        _C.prefer_huge_pages(output.data_ptr(), nbytes)
    return output
