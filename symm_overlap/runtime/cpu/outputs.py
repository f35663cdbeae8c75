"""Memory for the outputs of a call."""

from __future__ import annotations

from math import prod

from torch import Tensor

from ... import _C

LARGE = 8 << 20
"""Bytes from which malloc is likely to take fresh pages for a tensor, each of which is a fault at its first write."""


def new_output(like: Tensor, *shape: int) -> Tensor:
    """An uninitialised contiguous tensor with the dtype and device of ``like``.

    A large one on CPU gets large pages, and those of a freed one of its size where there are any: the faults of a fresh
    gathered tensor of 32 MiB take several times as long as copying it. At most 256 MiB wait for a next tensor, and the
    system may take them back before.
    """
    if prod(shape) * like.element_size() >= LARGE:
        return _C.large_output(shape, like.dtype)
    return like.new_empty(shape)
