"""The autograd layer of an op: what it keeps for the backward pass, and what it cannot differentiate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import _C
from .._torch import (
    below_autograd,
    differentiable,
    has_tangent,
    in_forward_mode,
    redispatch,
    transforms_active,
)
from ..settings import applied, current, in_backward
from . import straight


def autograd_kernel(op: Any, setup_context: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    # The backward pass may run in another thread, or after the blocks around the forward pass.
    def setup(ctx: Any, inputs: Any, output: Any, **keyword_only: Any) -> None:
        ctx.settings = current()
        ctx.backward_in_parts = True  # a pipeline may ask for the gradient of the input first and of the weights later
        setup_context(ctx, inputs, output, **keyword_only)

    def backward_as_forward(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
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
    """What the gradients of ``A @ B`` need: each is a factor of the other's, if that one has a gradient at all."""
    return A if B.requires_grad else None, B if A.requires_grad else None


def call_op(op: Any, *args: Any, **kwargs: Any) -> Any:
    """``op(*args, **kwargs)``, without the autograd layer where no gradient can be asked for later, and without the
    dispatcher where it would do nothing else. They take a tenth and a fifth of the time of a small call. Tensors are
    among ``args``.
    """
    if torch.compiler.is_compiling() or transforms_active() or _requires_grad(op, args):
        return op(*args, **kwargs)
    with below_autograd():
        return straight.call(op, args, kwargs)


def _requires_grad(op: Any, args: Sequence[Any]) -> bool:
    """Whether a gradient can be asked for later.

    Raises:
        TypeError, NotImplementedError: a tensor is of a sort that the op cannot take.
    """
    if _C.plain_without_gradient(args) and not in_forward_mode():
        return False
    return _any_requires_grad(op, args) and torch.is_grad_enabled()


def _any_requires_grad(op: Any, args: Iterable[Any]) -> bool:
    """Whether any tensor among the arguments requires a gradient.

    Raises:
        TypeError, NotImplementedError: a tensor is of a sort that the op cannot take.
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
            f"{op} takes the tensors of this rank, and got a DTensor: pass tensor.to_local(), or use a parallel style "
            "for the module it belongs to"
        )


def _require_no_tangent(op: Any, tensor: torch.Tensor) -> None:
    if has_tangent(tensor):
        raise NotImplementedError(
            f"{op} has no forward-mode derivative (torch.func.jvp): use backward() or torch.autograd.grad. It is "
            "linear in each tensor, so its derivative along a tangent is the op applied to the tangent"
        )
