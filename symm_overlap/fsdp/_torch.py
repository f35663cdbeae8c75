"""What this folder uses of torch that is private. Checked on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def ignore_in_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Let ``DistributedDataParallel(model)`` leave the parameters of these names alone, besides those it leaves now."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    model._ddp_params_and_buffers_to_ignore = [*ignored, *names]  # type: ignore[assignment]


def has_hooks(module: nn.Module) -> bool:
    """Whether something is registered to be called around ``module``."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)
