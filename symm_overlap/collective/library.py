"""The torch library `symm_overlap`: how an op is made known to torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import torch

from .._torch import below_autocast, resolve_group
from ..memory import current_lane, lane, timeout, timeout_ms
from .check import compared_here, tell_refusal
from .paths import force_path, forced

# A fragment: the C++ side defines ops of this name too.
_library = torch.library.Library("symm_overlap", "FRAGMENT")

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
    _library.define(name + signature, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    for key in ("CPU", "CUDA"):
        _library.impl(name, _telling_refusals(name, eager), key)
        if multiplies:
            _library.impl(name, _autocast(name, key.lower()), f"Autocast{key}")
    torch.library.register_fake(qualified, fake, lib=_library)

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

    torch.library.register_autograd(qualified, backward_as_forward, setup_context=setup, lib=_library)
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


def _telling_refusals(op: str, eager: Callable[..., Any]) -> Callable[..., Any]:
    """``eager``; while checking, its peers learn when it refuses its arguments."""
    signature = inspect.signature(eager)

    @wraps(eager)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = compared_here()
        try:
            return eager(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if compared_here() == before:  # or the peers know of this call
                with suppress(ValueError):  # there is no such group
                    group = resolve_group(signature.bind(*args, **kwargs).arguments["group_name"])
                    tell_refusal(op, group, error)
            raise

    return run
