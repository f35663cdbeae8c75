"""A call at the time of a layer's backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class InBackward(torch.autograd.Function):
    """A copy of ``x``, through which the gradient passes unchanged once ``call`` has returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.call()
        return grad, None
