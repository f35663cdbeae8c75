"""How parallel layers apply their functions with gradients of their own (`torch.autograd.Function`)."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ._torch import compiling, transforms_active


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return ``function.apply(*args)``.

    Warn if the backward pass will be missing, because torch exports only the forward pass of such a function.

    Raises:
        NotImplementedError: a transform of torch.func is active.
    """
    require_no_transform()
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling() and _requires_grad(args):
        warnings.warn(
            "torch.export does not keep the backward passes of parallel layers: gradients of the exported program will "
            "be missing or wrong. If it is for inference only, export it inside torch.no_grad()",
            stacklevel=2,
        )
    return function.apply(*args)


def require_no_transform() -> None:
    """Raise NotImplementedError if a transform of torch.func is active."""
    if not compiling() and transforms_active():
        raise NotImplementedError(
            "parallel layers cannot be transformed by torch.func (grad, vjp, jvp, vmap): use backward() or "
            "torch.autograd.grad. torch.func.functional_call works"
        )


def _requires_grad(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
