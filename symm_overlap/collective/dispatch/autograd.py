"""The autograd layer of an op: what it keeps for the backward pass, and which inputs it cannot differentiate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ... import _C
from ..._torch import (
    below_autocast,
    below_autograd,
    compiling,
    differentiable,
    has_tangent,
    in_forward_mode,
    redispatch,
    transforms_active,
)
from ...settings import applied, current, in_backward
from . import direct_call


def autograd_kernel(op: Any, setup_context: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    # The backward pass may run in another thread, or after the blocks around the forward pass have ended.
    def setup(ctx: Any, inputs: Any, output: Any, **keyword_only: Any) -> None:
        ctx.settings = current()
        ctx.backward_in_parts = True  # a pipeline may ask for the gradient of the input first and of the weights later
        setup_context(ctx, inputs, output, **keyword_only)

    def backward_as_forward(ctx: Any, *grads: Any) -> Any:
        # Autocast has cast what the forward pass was given. The backward pass has the dtypes of the forward pass, even
        # if it alone is inside an autocast block.
        with below_autocast():
            if compiling():
                return backward(ctx, *grads)
            with applied(in_backward(ctx.settings)):
                return backward(ctx, *grads)

    with_gradients = differentiable(op, setup, backward_as_forward)

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if _requires_grad(op, args):
            if transforms_active():  # torch has no support for them in ops that Python defines
                raise NotImplementedError(
                    f"{op} has no gradient inside torch.func.grad and torch.func.vjp: use backward() or "
                    "torch.autograd.grad"
                )
            return with_gradients(keyset, *args, **kwargs)
        with below_autograd():
            return redispatch(op, keyset, *args, **kwargs)

    return run


def factors_to_keep(A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what the gradients of ``A @ B`` need. Each factor is needed only for the gradient of the other factor."""
    return A if B.requires_grad else None, B if A.requires_grad else None


def call_op(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``op(*args, **kwargs)``. Tensors must be among ``args``.

    The autograd layer is skipped if no gradient can be requested later, which saves a tenth of the time of a small
    call. The dispatcher is skipped if it would only call the kernel, which saves a fifth.
    """
    if compiling():
        return op(*args, **kwargs)
    key = _C.kernel_key((args, *kwargs.items()) if kwargs else args)
    if key is None and (transforms_active() or _requires_grad(op, args)):
        return op(*args, **kwargs)
    with below_autograd():
        return op(*args, **kwargs) if key is None else direct_call.call(op, key, args, kwargs)


def _requires_grad(op: Any, args: Sequence[Any]) -> bool:
    """True if a gradient can be requested later.

    Raises:
        TypeError, NotImplementedError: a tensor is of a kind that the op does not accept.
    """
    return _any_requires_grad(op, args) and torch.is_grad_enabled()


def _any_requires_grad(op: Any, args: Iterable[Any]) -> bool:
    """True if any tensor among the arguments requires a gradient.

    Raises:
        TypeError, NotImplementedError: a tensor is of a kind that the op does not accept.
    """
    found = False
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if type(arg) not in _PLAIN:
                _require_local(op, arg)
            if in_forward_mode():
                _require_no_tangent(op, arg)
            found = found or arg.requires_grad
        elif isinstance(arg, (list, tuple)):
            found = _any_requires_grad(op, arg) or found
    return found


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _require_local(op: Any, tensor: torch.Tensor) -> None:
    if type(tensor).__name__ == "DTensor":
        raise TypeError(
            f"{op} accepts only local tensors of this rank, and got a DTensor: pass tensor.to_local(), or use a "
            "parallel style for the module that the tensor belongs to"
        )


def _require_no_tangent(op: Any, tensor: torch.Tensor) -> None:
    if has_tangent(tensor):
        raise NotImplementedError(
            f"{op} has no forward-mode derivative (torch.func.jvp): use backward() or torch.autograd.grad. It is "
            "linear in each tensor, so its derivative along a tangent is the op applied to the tangent"
        )
