"""Keep a product that was computed for a linear layer before the layer is called, and decide when it is still valid.

In eager mode a record is kept at the layer. In compiled code the tensors are put into a slot of the layer, by a context
manager: the compiler accepts no other write inside an activation checkpoint. Both last until the call ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import reparametrized, saved_tensors_hooks


class Offer(NamedTuple):
    """A product that was computed for a layer.

    Attributes:
        layer: the layer.
        x: the input that was multiplied by the layer's weight.
        product: this rank's part of the product, without bias.
    """

    layer: Any
    x: Tensor
    product: Tensor


class _Kept(NamedTuple):
    """The record that a layer keeps in eager mode; see `Offer` and `_circumstances`."""

    x: Tensor
    weight: Tensor
    product: Tensor
    circumstances: tuple[Any, ...]


class _Slot(nn.Module):
    """The place where compiled code keeps a product for a layer.

    The tensors are buffers: a parameter that is assigned to a plain attribute would become a parameter of the module.
    """

    x: Tensor | None
    weight: Tensor | None
    product: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        for name in ("x", "weight", "product"):
            self.register_buffer(name, None, persistent=False)


def without_offer(layer: Any) -> None:
    """Set the attributes of a layer for which no product is kept."""
    layer.offer = None
    layer.offer_slot = (_Slot(),)  # in a tuple, so that the slot is no submodule of the layer


def with_offers(offers: Sequence[Offer], call: Callable[[], Any]) -> Any:
    """Return ``call()``. The products are kept for their layers until the call ends."""
    if not torch.compiler.is_compiling():
        with _keeping(offers):
            return call()
    if not offers:
        return call()
    first, *others = offers
    (slot,) = first.layer.offer_slot
    with reparametrized(slot, {"x": first.x, "weight": first.layer.weight, "product": first.product}):
        return with_offers(others, call)


@contextmanager
def _keeping(offers: Sequence[Offer]) -> Iterator[None]:
    for offer in offers:
        weight = offer.layer.weight
        offer.layer.offer = _Kept(offer.x, weight, offer.product, _circumstances(offer.x, weight))
    try:
        yield
    finally:
        for offer in offers:
            offer.layer.offer = None


def offered(module: Any, x: Tensor) -> Tensor | None:
    """Return the kept product of ``x`` and the module's weight, or None if there is none or anything has changed."""
    if torch.compiler.is_compiling():
        return _offered_in_graph(module, x)
    kept: _Kept | None = module.offer
    if kept is None or x is not kept.x or module.weight is not kept.weight:
        return None
    return kept.product if kept.circumstances == _circumstances(x, module.weight) else None


def _offered_in_graph(module: Any, x: Tensor) -> Tensor | None:
    """`offered` in compiled code. It relies on torch to reject writes to the shared input (`read_only`, docs/nn.md)."""
    (slot,) = module.offer_slot
    product: Tensor | None = slot.product
    if product is None or x is not slot.x or module.weight is not slot.weight:
        return None
    # The modes may have changed since: the product shows under which it was computed.
    differentiable = torch.is_grad_enabled() and (x.requires_grad or module.weight.requires_grad)
    dtype = x.dtype if x.dtype is torch.float64 else _autocast_dtype(x) or x.dtype
    return product if product.requires_grad is differentiable and product.dtype is dtype else None


def _circumstances(x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """Return everything that a product and its gradient depend on, except the identity of the two tensors.

    A checkpoint around the layer alone runs the layer again when the product is gone. So the first run inside it must
    not use the product either: saved-tensor hooks that differ tell the two apart.
    """
    if torch.compiler.is_compiling():  # a module with graph breaks, of which this function is traced alone
        return ()
    return torch.is_grad_enabled(), _autocast_dtype(x), saved_tensors_hooks(), x._version, weight._version


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts matmuls on the device of ``x``, or None without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
