"""One matmul of an op, into memory that is there."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """``torch.mm(a, b, out=out)``, or ``out.addmm_(a, b)``.

    On CPU float32 goes to oneDNN where MKL, which torch calls, would leave half of the machine unused
    (csrc/cpu/matmul.cpp says when). As with torch's own ops, ``torch.backends.mkldnn.enabled`` turns that off.
    """
    if out.device.type == "cpu":
        _C.multiply(a, b, out, add)
    elif add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def calls_torch(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether every matmul of this dtype is torch's own here."""
    return device.type != "cpu" or dtype != torch.float32 or not _C.onednn_is_quicker()
