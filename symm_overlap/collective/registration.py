"""The torch library `symm_overlap`: how an op is made known to torch.

An op's file gives plain functions; here they get what every op needs: the group behind its name, autograd, autocast,
a key in the compiler's caches, and errors that a user can read.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from .._torch import (
    add_to_cache_keys,
    below_autocast,
    below_autograd,
    differentiable,
    has_tangent,
    in_forward_mode,
    redispatch,
    resolve_group,
    transforms_active,
    untracked_views,
)
from ..runtime import TRAITS
from ..settings import applied, current, in_backward
from .arguments import group_name
from .comparison import REJECTIONS, report_rejection
from .exchange import Peers

# A fragment: the C++ side defines ops of this name too.
library = torch.library.Library("symm_overlap", "FRAGMENT")

OPS: list[str] = []
"""Names of the ops defined here, without the namespace."""

_calls = threading.local()  # .kernels: how many kernels of ops this thread has entered


def define(
    name: str,
    signature: str,
    *,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    multiplies: bool = False,
    flop: Callable[..., int] | None = None,
) -> None:
    """Define ``torch.ops.symm_overlap.<name>``.

    Args:
        signature: the schema without the name, with an argument ``str group_name``: ``"(Tensor A, ...) -> Tensor"``.
        eager: the implementation, on CPU and CUDA: called with the `Peers` in place of the group's name, first of all.
        fake: outputs of the same sizes, strides and dtypes, without data; takes symbolic sizes. Called with the world
            size in place of the group's name, first of all.
        setup_context, backward: as for `torch.library.register_autograd`.
        multiplies: whether it is a matmul to autocast, which then chooses its dtype as for ``torch.matmul``.
        flop: the op's work in FLOP, as for `torch.utils.flop_counter.register_flop_formula`.
    """
    qualified = f"symm_overlap::{name}"
    # Strides are part of what an op promises, on both sides: the compiler must not hand it other ones.
    library.define(name + signature, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    op = getattr(torch.ops.symm_overlap, name).default
    at = [argument.name for argument in op._schema.arguments].index("group_name")
    for device in TRAITS:
        key = device.upper()
        library.impl(name, _kernel(name, eager, at), key)
        if multiplies:
            library.impl(name, _autocast(op, device), f"Autocast{key}")
    library.impl(name, _autograd(op, setup_context, backward), "Autograd", with_keyset=True)
    torch.library.register_fake(qualified, _fake_kernel(fake, at), lib=library)
    torch.library.register_vmap(qualified, _no_vmap(name), lib=library)
    if flop is not None:
        _register_flop(op, flop)
    OPS.append(name)


def _kernel(op: str, eager: Callable[..., Any], at: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        _calls.kernels = getattr(_calls, "kernels", 0) + 1
        peers = Peers(args[at], current())
        try:
            with untracked_views():
                return eager(peers, *args[:at], *args[at + 1 :], **kwargs)
        except Exception as error:
            if isinstance(error, REJECTIONS):
                report_rejection(op, peers, error)
            raise _for_users(error)  # noqa: B904 (the same exception)

    return run


def _fake_kernel(fake: Callable[..., Any], at: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        world = size_in_graph(args[at])
        return fake(world, *args[:at], *args[at + 1 :], **kwargs)

    return run


def size_in_graph(name: str) -> int:
    """The size of a group, on which the graph that is being traced then depends.

    The compiler's caches know a group by its name alone: a graph compiled for another size must have another key.
    """
    world = resolve_group(name).size()
    add_to_cache_keys(name, world)
    return world


def size_of_group(name: str) -> int:
    """How many ranks a group has."""
    return resolve_group(name).size()


def _autograd(op: Any, setup_context: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    # The backward pass may run in another thread, or after the blocks around the forward pass.
    def setup(ctx: Any, inputs: Any, output: Any, **keyword_only: Any) -> None:
        ctx.settings = current()
        setup_context(ctx, inputs, output, **keyword_only)

    def backward_as_forward(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        with applied(in_backward(ctx.settings)):
            return backward(ctx, *grads)

    with_gradients = differentiable(op, setup, backward_as_forward)

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if _requires_grad(op, args) and torch.is_grad_enabled():
            if transforms_active():  # torch has no support for them in ops that Python defines
                raise NotImplementedError(
                    f"{op} has no gradient inside torch.func.grad and torch.func.vjp: use backward() or "
                    "torch.autograd.grad"
                )
            return with_gradients(keyset, *args, **kwargs)
        with below_autograd():
            return redispatch(op, keyset, *args, **kwargs)

    return run


def call_op(op: Any, *args: Any, **kwargs: Any) -> Any:
    """``op(*args, **kwargs)``, without the autograd layer where no gradient can be asked for later. That layer takes a
    tenth of the time of a small call.
    """
    if torch.compiler.is_compiling() or transforms_active() or (_requires_grad(op, args) and torch.is_grad_enabled()):
        return op(*args, **kwargs)
    with below_autograd():
        return op(*args, **kwargs)


def _requires_grad(op: Any, args: Iterable[Any]) -> bool:
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
            found = _requires_grad(op, arg) or found
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


def _no_vmap(op: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"symm_overlap.{op} cannot be vmapped, since every rank would have to make the same calls: add the batch "
            "dimension to the tensors, which may have any number of dimensions"
        )

    return refuse


def _register_flop(op: Any, flop: Callable[..., int]) -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(op.overloadpacket)(flop)


def _autocast(op: Any, device_type: str) -> Callable[..., Any]:
    """The op with its tensors cast as autocast casts those of a matmul: every floating dtype but float64."""

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return [cast(item, dtype) for item in value]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
            return value.to(dtype)
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with below_autocast(device_type):
            return op(*cast(args, dtype), **kwargs)

    return run


_Wrapper = TypeVar("_Wrapper", bound=Callable[..., Any])


def functional(wrapper: _Wrapper) -> _Wrapper:
    """A function that calls an op for a ``group`` of any kind.

    Peers learn also of a call that this function or the dispatcher rejects.
    """
    bind = inspect.signature(wrapper).bind

    @wraps(wrapper)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return wrapper(*args, **kwargs)
        kernels = getattr(_calls, "kernels", 0)
        try:
            return wrapper(*args, **kwargs)
        except Exception as error:
            found = _dispatcher_error(wrapper.__name__, error)
            if kernels == getattr(_calls, "kernels", 0) and isinstance(found, REJECTIONS):
                _count_rejection(wrapper.__name__, bind, args, kwargs, found)
            raise _for_users(found) from (error.__cause__ if found is error else None)

    return cast(_Wrapper, run)


def _count_rejection(
    op: str, bind: Callable[..., inspect.BoundArguments], args: Any, kwargs: Any, error: Exception
) -> None:
    """Count a call that was rejected before it reached a kernel, and tell the peers about it."""
    try:
        peers = Peers(group_name(bind(*args, **kwargs).arguments["group"]), current())
    except (*REJECTIONS, RuntimeError):  # there is no such group
        return
    report_rejection(op, peers, error)


def _dispatcher_error(name: str, error: Exception) -> Exception:
    """What the dispatcher says of an argument of a wrong type, or of tensors that nobody has a kernel for, as a
    TypeError; any other error as it is.
    """
    text = str(error)
    if isinstance(error, RuntimeError):
        if text.startswith("symm_overlap::"):
            return TypeError(text)
        if isinstance(error, NotImplementedError) and "symm_overlap::" in text:
            return TypeError(f"{name} takes tensors on CPU or CUDA: {text.split('. ')[0]}")
    return error


def _for_users(error: Exception) -> Exception:
    """The error without the frames inside this package; SYMM_OVERLAP_FULL_TRACEBACK=1 keeps them."""
    if os.environ.get("SYMM_OVERLAP_FULL_TRACEBACK", "0") in ("", "0"):
        return error.with_traceback(None)
    return error
