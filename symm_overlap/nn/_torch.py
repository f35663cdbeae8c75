"""The private APIs of torch that the parallel layers use besides those in `symm_overlap._torch`.

Checked on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

from typing import Any

__all__ = ["comptime", "strided_shard"]


def comptime() -> Any:
    """Return torch's ``comptime``: ``comptime(f, g)`` calls ``f`` while the compiler traces, and ``g`` when code runs.

    It is imported late, since importing the compiler takes seconds.
    """
    from torch._dynamo.comptime import comptime

    return comptime


def strided_shard(dim: int, parts: int) -> Any:
    """Return the DTensor placement for a dimension made of ``parts`` equal parts, each of which is sharded."""
    from torch.distributed.tensor.placement_types import _StridedShard  # imported late: it takes half a second

    return _StridedShard(dim, split_factor=parts)
