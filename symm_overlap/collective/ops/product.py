"""The matmuls of the ops: one into memory that is there, and one that can be differentiated.

On CPU float32 goes to oneDNN where MKL, which torch calls, would leave half of the machine unused (csrc/cpu/matmul.cpp
says when). As with torch's own ops, ``torch.backends.mkldnn.enabled = False`` turns that off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _C
from .library import library


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """``torch.mm(a, b, out=out)``, or ``out.addmm_(a, b)``."""
    if out.device.type == "cpu":
        _C.multiply(a, b, out, add)
    elif add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of matrices, for backward passes: with gradients, and for the compiler to trace."""
    if calls_torch(a.dtype, a.device):
        return a @ b
    result: Tensor = torch.ops.symm_overlap._product(a, b)
    return result


def calls_torch(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether every matmul of this dtype is torch's own here."""
    return device.type != "cpu" or dtype != torch.float32 or not _C.onednn_is_quicker()


def _eager(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    multiply(a, b, out)
    return out


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    grad_a = product(grad, b.t()) if ctx.needs_input_grad[0] else None
    grad_b = product(a.t(), grad) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b


library.define("_product(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for key in ("CPU", "CUDA"):
    library.impl("_product", _eager, key)
torch.library.register_fake("symm_overlap::_product", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), lib=library)
torch.library.register_autograd("symm_overlap::_product", _backward, setup_context=_setup_context, lib=library)
