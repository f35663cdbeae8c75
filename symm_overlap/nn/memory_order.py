"""Functions that change nothing but the order in which gradients lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..custom_gradient import apply


def transposed(weight: Tensor) -> Tensor:
    """Return ``weight.t()`` such that its gradient has the memory order of the weight.

    Ops compute the gradient of a right-hand side row by row. Adding it to the gradients of earlier passes, which have
    another memory order, takes more than twice the time.
    """
    right: Tensor = apply(_Transposed, weight)
    return right


def contiguous_gradient(x: Tensor) -> Tensor:
    """Return ``x`` such that its gradient is contiguous if ``x`` is. The model's own functions may rely on that."""
    same: Tensor = apply(_ContiguousGradient, x)
    return same


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.contiguous = x.is_contiguous()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous() if ctx.contiguous else grad


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # a layer that was not called has no gradient, instead of zeros
        return weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.t().contiguous()
