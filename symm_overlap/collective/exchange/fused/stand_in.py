"""Tensors that stand for others where only their kind counts, as it does for a compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...._torch import has_no_data, tree_map_only

_ALIGNED = 16  # bytes; of more multiples than that no kernel knows


def stand_ins(values: Any) -> Any:
    """The same, nested in any way, with a tensor of the device "meta" in the place of each tensor: of its shape, its
    strides and its dtype, at an address that is divisible by 16 where its own one is.

    A tensor that has no data yet will begin where it does in its storage, and storage begins at a multiple of 16 bytes.
    """
    return tree_map_only(Tensor, _stand_in, values)


def _stand_in(tensor: Tensor) -> Tensor:
    itemsize = tensor.itemsize
    address = tensor.storage_offset() * itemsize if has_no_data(tensor) else tensor.data_ptr()
    offset = address % _ALIGNED // itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.empty(offset + max(last, -1) + 1, dtype=tensor.dtype, device="meta")
    return storage.as_strided(tensor.shape, tensor.stride(), offset)
