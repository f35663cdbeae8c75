"""The private APIs of torch that the parallel layers use besides those in `symm_overlap._torch`.

Checked on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["all_to_all", "comptime", "strided_shard"]


def all_to_all(parts: Sequence[Tensor], group: str) -> tuple[Tensor, ...]:
    """Send ``parts[r]`` to rank r, and return what each rank sent here. All parts have one shape, and are not empty.

    torch.export keeps this collective, which it cannot do with those of `torch.distributed`.
    """
    ops = torch.ops._c10d_functional
    sizes = [1] * len(parts)
    sent = torch.stack(tuple(parts)).contiguous().view(torch.uint8)  # gloo does not send every dtype
    received: Tensor = ops.wait_tensor(ops.all_to_all_single(sent, sizes, sizes, group))
    return received.view(parts[0].dtype).unbind()


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
