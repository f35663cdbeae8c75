"""A product that was computed for a linear layer before the layer is called, and when the layer may take it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import graph_being_traced, saved_tensors_hooks


class Offer(NamedTuple):
    """A product that is kept for a layer.

    Attributes:
        x, weight: the input and the parameter of which it is the product.
        product: this rank's part, without bias.
        circumstances: see `circumstances_of`.
    """

    x: Tensor
    weight: Tensor
    product: Tensor
    circumstances: tuple[Any, ...]


def offer(module: Any, x: Tensor, product: Tensor) -> None:
    """Keep the product of the module's weight and ``x``."""
    module.offer = Offer(x, module.weight, product, circumstances_of(x, module.weight))


def withdraw(module: Any) -> None:
    """Drop what is kept."""
    module.offer = None


def offered(module: Any, x: Tensor) -> Tensor | None:
    """The product of the module's weight and ``x``, if it is kept and nothing has changed since."""
    kept: Offer | None = getattr(module, "offer", None)
    if kept is None or x is not kept.x or module.weight is not kept.weight:
        return None
    return kept.product if kept.circumstances == circumstances_of(x, module.weight) else None


def circumstances_of(x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """What a product and its gradient depend on, besides which tensors they are of."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    modes = (torch.is_grad_enabled(), autocast)
    if torch.compiler.is_compiling():
        # In one graph nobody can have written to the input (`read_only`); between two of them anything may happen.
        return (*modes, graph_being_traced())
    # A checkpoint around the layer alone runs it again when the product is gone, and must find the same the first time.
    return (*modes, saved_tensors_hooks(), x._version, weight._version)
