"""The matmul of backward passes.

It is differentiable, the compiler can trace it, and it uses the matmul that the back end of the device chooses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import TRAITS, backend_of
from ..biases import gradient
from ..dispatch.autograd import factors_to_keep
from ..dispatch.registration import library


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b`` of two matrices, or ``torch.addmm(bias, a, b)``."""
    if backend_of(a.device.type).calls_torch(a.dtype):
        return a @ b if bias is None else torch.addmm(bias, a, b)
    result: Tensor = torch.ops.symm_overlap._product.default(a, b, bias)
    return result


def product_of_rows(A: Tensor, G: Tensor, dim: int) -> Tensor:
    """Return ``A.T @ G`` over all rows, in the order that needs no copy if ``dim`` is the outermost in memory."""
    if dim != A.dim() - 1:
        A, G = A.movedim(dim, 0), G.movedim(dim, 0)
    return product(A.flatten(0, -2).t(), G.flatten(0, -2))


def _eager(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    backend_of(a.device.type).multiply(a, b, out, bias=bias)
    return out


def _fake(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.backward_in_parts = True
    ctx.save_for_backward(*factors_to_keep(*inputs[:2]))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    grad_a = product(grad, b.t()) if ctx.needs_input_grad[0] else None
    grad_b = product(a.t(), grad) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b, *(gradient(needed, grad) for needed in ctx.needs_input_grad[2:])


library.define("_product(Tensor a, Tensor b, Tensor? bias=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for device in TRAITS:
    library.impl("_product", _eager, device.upper())
torch.library.register_fake("symm_overlap::_product", _fake, lib=library)
torch.library.register_autograd("symm_overlap::_product", _backward, setup_context=_setup_context, lib=library)
