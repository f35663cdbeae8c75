"""The torch library `symm_overlap`: how an op is made known to torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from .._torch import below_autocast, resolve_group, untracked_views
from ..memory import current_lane, lane, timeout, timeout_ms
from .arguments import group_name
from .check import telling_refusals
from .paths import force_path, forced

# A fragment: the C++ side defines ops of this name too.
library = torch.library.Library("symm_overlap", "FRAGMENT")

OPS: list[str] = []
"""Names of the ops defined here, without the namespace."""


def define(
    name: str,
    signature: str,
    *,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    multiplies: bool = False,
) -> None:
    """Define ``torch.ops.symm_overlap.<name>``.

    Args:
        signature: the schema without the name: ``"(Tensor A, ...) -> Tensor"``.
        eager: the implementation, on CPU and CUDA.
        fake: outputs of the same sizes, strides and dtypes, without data; takes symbolic sizes.
        setup_context, backward: as for `torch.library.register_autograd`.
        multiplies: whether it is a matmul to autocast, which then chooses its dtype as for ``torch.matmul``.
    """
    qualified = f"symm_overlap::{name}"
    # Strides are part of what an op promises, on both sides: the compiler must not hand it other ones.
    library.define(name + signature, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    for key in ("CPU", "CUDA"):
        library.impl(name, _eager_op(name, eager), key)
        if multiplies:
            library.impl(name, _autocast(name, key.lower()), f"Autocast{key}")
    torch.library.register_fake(qualified, fake, lib=library)

    # The backward pass may run in another thread, or after the blocks around the forward pass: it keeps their settings.
    def setup(ctx: Any, inputs: Any, output: Any, **keyword_only: Any) -> None:
        ctx.settings = current_lane(), forced(), timeout_ms()
        setup_context(ctx, inputs, output, **keyword_only)

    def backward_as_forward(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        index, (path, chunks, streams), milliseconds = ctx.settings
        with lane(index), force_path(path, chunks=chunks, streams=streams), timeout(milliseconds / 1000):
            return backward(ctx, *grads)

    torch.library.register_autograd(qualified, backward_as_forward, setup_context=setup, lib=library)
    OPS.append(name)


def _autocast(op: str, device_type: str) -> Callable[..., Any]:
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
            return getattr(torch.ops.symm_overlap, op)(*cast(args, dtype), **kwargs)

    return run


def _eager_op(op: str, eager: Callable[..., Any]) -> Callable[..., Any]:
    """``eager`` as the dispatcher is to call it."""
    bind = inspect.signature(eager).bind

    @wraps(eager)
    def run(*args: Any, **kwargs: Any) -> Any:
        def group() -> dist.ProcessGroup:
            return resolve_group(bind(*args, **kwargs).arguments["group_name"])

        with untracked_views(), telling_refusals(op, group):
            return eager(*args, **kwargs)

    return run


_Wrapper = TypeVar("_Wrapper", bound=Callable[..., Any])


def functional(wrapper: _Wrapper) -> _Wrapper:
    """A function that calls an op for a ``group`` of any kind; also what it, or the dispatcher, refuses is told."""
    bind = inspect.signature(wrapper).bind

    @wraps(wrapper)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return wrapper(*args, **kwargs)

        def group() -> dist.ProcessGroup:
            return resolve_group(group_name(bind(*args, **kwargs).arguments["group"]))

        with telling_refusals(wrapper.__name__, group):
            try:
                return wrapper(*args, **kwargs)
            except RuntimeError as error:
                # What the dispatcher says of an argument of a wrong type, and of tensors nobody has a kernel for.
                text = str(error)
                if text.startswith("symm_overlap::"):
                    raise TypeError(text) from None
                if isinstance(error, NotImplementedError) and "symm_overlap::" in text:
                    raise TypeError(f"{wrapper.__name__} takes tensors on CPU or CUDA: {text.split('. ')[0]}") from None
                raise

    return cast(_Wrapper, run)
