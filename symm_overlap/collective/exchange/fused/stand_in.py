"""Tensors without data that replace others if only shapes, strides and dtypes count, as for a compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...._torch import has_no_data, tree_map_only

_ALIGNED = 16  # bytes; kernels are not specialised for larger alignments


def stand_ins(values: Any) -> Any:
    """Return ``values``, nested in any way, with each tensor replaced by a tensor on the device "meta".

    The new tensor has the same shape, strides and dtype, and the same alignment of its address up to 16 bytes. For a
    tensor without data, storage is assumed to begin at a multiple of 16 bytes, so the storage offset gives the
    alignment.
    """
    return tree_map_only(Tensor, _stand_in, values)


def _stand_in(tensor: Tensor) -> Tensor:
    itemsize = tensor.itemsize
    address = tensor.storage_offset() * itemsize if has_no_data(tensor) else tensor.data_ptr()
    offset = address % _ALIGNED // itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.empty(offset + max(last, -1) + 1, dtype=tensor.dtype, device="meta")
    return storage.as_strided(tensor.shape, tensor.stride(), offset)
