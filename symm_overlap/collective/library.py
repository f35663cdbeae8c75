"""The torch library `symm_overlap`: how an op is made known to torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import torch

from .._torch import resolve_group
from ..memory import current_lane, lane
from .check import compared_here, tell_refusal

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
) -> None:
    """Define ``torch.ops.symm_overlap.<name>``.

    Args:
        signature: the schema without the name: ``"(Tensor A, ...) -> Tensor"``.
        eager: the implementation, on CPU and CUDA.
        fake: outputs of the same sizes, strides and dtypes, without data; takes symbolic sizes.
        setup_context, backward: as for `torch.library.register_autograd`.
    """
    qualified = f"symm_overlap::{name}"
    # Strides are part of what an op promises, on both sides: the compiler must not hand it other ones.
    _library.define(name + signature, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    for key in ("CPU", "CUDA"):
        _library.impl(name, _telling_refusals(name, eager), key)
    torch.library.register_fake(qualified, fake, lib=_library)

    # The backward pass may run in another thread, or after the block that chose the lane: it takes the forward pass's.
    def setup(ctx: Any, inputs: Any, output: Any, **keyword_only: Any) -> None:
        ctx.lane = current_lane()
        setup_context(ctx, inputs, output, **keyword_only)

    def backward_on_lane(ctx: Any, *grads: Any) -> Any:
        with lane(ctx.lane):
            return backward(ctx, *grads)

    torch.library.register_autograd(qualified, backward_on_lane, setup_context=setup, lib=_library)
    OPS.append(name)


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
