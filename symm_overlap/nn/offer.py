"""Keep a product that was computed for a linear layer before the layer is called, and decide when it is still valid."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import graph_being_traced, saved_tensors_hooks


class Offer(NamedTuple):
    """A product that is kept for a layer.

    Attributes:
        x, weight: the input and the parameter that were multiplied.
        product: this rank's part of the product, without bias.
        circumstances: see `circumstances_of`.
    """

    x: Tensor
    weight: Tensor
    product: Tensor
    circumstances: tuple[Any, ...]


def offer(module: Any, x: Tensor, product: Tensor) -> None:
    """Keep the product of ``x`` and the module's weight for the module's next call."""
    module.offer = Offer(x, module.weight, product, circumstances_of(x, module.weight))


def withdraw(module: Any) -> None:
    """Drop the product that is kept for the module."""
    module.offer = None


def offered(module: Any, x: Tensor) -> Tensor | None:
    """Return the kept product of ``x`` and the module's weight, or None if there is none or anything has changed."""
    kept: Offer | None = getattr(module, "offer", None)
    if kept is None or x is not kept.x or module.weight is not kept.weight:
        return None
    return kept.product if kept.circumstances == circumstances_of(x, module.weight) else None


def circumstances_of(x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """Return everything that a product and its gradient depend on, except the identity of the two tensors."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    modes = (torch.is_grad_enabled(), autocast)
    if torch.compiler.is_compiling():
        # Within one graph nothing can write to the input (`read_only`). Between two graphs anything may happen.
        return (*modes, graph_being_traced())
    # A checkpoint around the layer alone runs the layer again when the product is gone. So the first run inside it must
    # not use the product either: saved-tensor hooks that differ tell the two apart.
    return (*modes, saved_tensors_hooks(), x._version, weight._version)
