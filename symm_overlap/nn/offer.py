"""Keep a product that was computed for a linear layer before the layer is called, and decide when it is still valid.

In eager mode each thread keeps its records. In compiled code the tensors are put into a slot of the layer, by a context
manager: the compiler accepts no other write inside an activation checkpoint. Both last until the call ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import compiling, own_part, reparametrized, saved_tensors_hooks
from ._torch import comptime


class Offer(NamedTuple):
    """A product that was computed for a layer.

    Attributes:
        layer: the layer.
        x: the input that was multiplied by the layer's weight.
        product: this rank's part of the layer's output: the product, and the bias.
        bypasses: whether the gradient of the product does not pass ``x``, but goes directly to the shard that ``x`` was
            gathered from. Then nothing may be done with the gradient of ``x``, such as a hook.
    """

    layer: Any
    x: Tensor
    product: Tensor
    bypasses: bool


class _Kept(NamedTuple):
    """The record that a layer keeps in eager mode; see `Offer` and `_circumstances`."""

    offer: Offer
    weight: Tensor
    bias: Tensor | None
    circumstances: tuple[Any, ...]


class _Slot(nn.Module):
    """The place where compiled code keeps a product for a layer.

    The tensors are buffers: a parameter that is assigned to a plain attribute would become a parameter of the module.
    """

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    product: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        for name in ("x", "weight", "bias", "product"):
            self.register_buffer(name, None, persistent=False)


class _Records(threading.local):
    """The records of this thread, by the id of the layer. Another thread may be in the forward of the same module."""

    def __init__(self) -> None:
        self.of: dict[int, _Kept] = {}


_records = _Records()


def without_offer(layer: Any) -> None:
    """Set the attribute of a layer for which no product is kept."""
    layer.offer_slot = (_Slot(),)  # in a tuple, so that the slot is no submodule of the layer


def with_offers(offers: Sequence[Offer], call: Callable[[], Any]) -> Any:
    """Return ``call()``. The products are kept for their layers until the call ends."""
    if not compiling():
        with _keeping(offers):
            return call()
    if not offers:
        return call()
    first, *others = offers
    (slot,) = first.layer.offer_slot
    x, weight, bias, product = first.x, first.layer.weight, first.layer.bias, first.product
    comptime()(_keep_versions)
    kept = {"x": x, "weight": weight, "product": product}
    with reparametrized(slot, kept if bias is None else {**kept, "bias": bias}):
        return with_offers(others, call)


@contextmanager
def _keeping(offers: Sequence[Offer]) -> Iterator[None]:
    records = _records.of
    outside = {id(offer.layer): records.get(id(offer.layer)) for offer in offers}  # of the same layer, further out
    for offer in offers:
        weight, bias = offer.layer.weight, offer.layer.bias
        records[id(offer.layer)] = _Kept(offer, weight, bias, _circumstances(offer.x, weight, bias))
    try:
        yield
        for offer in offers:
            if id(offer.layer) not in records and offer.bypasses and _is_observed(offer.x):
                raise RuntimeError(f"{_OBSERVED}, after it has called one of them. {_WHY_OBSERVED}")
    finally:
        for key, kept in outside.items():
            records.pop(key, None)
            if kept is not None:
                records[key] = kept


_OBSERVED = "symm_overlap.nn: a module registers a hook on the gradient of the input that its linear layers share"
_WHY_OBSERVED = (
    "The gradients of these layers do not pass this tensor: let no layers share the gather, by "
    "PrepareModuleInput(linears=(), ...)"
)


def _is_observed(x: Tensor) -> bool:
    """True if something is to be done with the gradient of ``x``."""
    return bool(x._backward_hooks) or x.retains_grad


def offered(module: Any, x: Tensor) -> Tensor | None:
    """Return the kept output of the module for ``x``, or None if there is none or anything has changed.

    Each output is returned once, because the caller may write to it, and call the module again.
    """
    if compiling():
        return _offered_in_graph(module, x)
    kept = _records.of.get(id(module))
    if kept is None or x is not kept.offer.x or module.weight is not kept.weight or module.bias is not kept.bias:
        return None
    if kept.circumstances != _circumstances(x, module.weight, module.bias) or (kept.offer.bypasses and _is_observed(x)):
        return None
    del _records.of[id(module)]
    return kept.offer.product


def _offered_in_graph(module: Any, x: Tensor) -> Tensor | None:
    """`offered` in compiled code."""
    (slot,) = module.offer_slot
    product: Tensor | None = slot.product
    weight, bias = module.weight, module.bias
    if product is None or x is not slot.x or weight is not slot.weight or bias is not slot.bias:
        return None
    written: list[bool] = []
    comptime()(_break_if_written_to, lambda: written.append(True))  # the second function runs behind a graph break
    if written or not _first_use():
        return None
    # The modes may have changed since: the product shows under which it was computed.
    with_gradient = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    differentiable = torch.is_grad_enabled() and with_gradient
    dtype = x.dtype if x.dtype is torch.float64 else _autocast_dtype(x) or x.dtype
    return product if product.requires_grad is differentiable and product.dtype is dtype else None


# The versions of a layer's input, weight, bias and product when the product was computed, by the product; and the
# version of an input that a layer has read. They are those of the fake tensors by which the compiler traces: code in a
# graph cannot tell whether the graph has written to a tensor.
_versions = WeakTensorKeyDictionary()
_read = WeakTensorKeyDictionary()


class _Uses(threading.local):
    """The products that the graph which this thread traces has used, and whether the latest use was the first."""

    def __init__(self) -> None:
        self.used = WeakTensorKeyDictionary()
        self.latest_is_first = False


_uses = _Uses()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _first_use() -> bool:
    """True if the graph that is traced has not used the product that `_break_if_written_to` has just checked."""
    return _uses.latest_is_first


def _keep_versions(context: Any) -> None:
    """Note the versions of the caller's tensors, while the compiler traces the call."""
    _versions[_traced(context, "product")] = _versions_now(context)


def _break_if_written_to(context: Any) -> None:
    """Break the graph if the caller's ``x``, ``weight``, ``bias`` or ``product`` was written to since: the module then
    runs uncompiled.

    Raises:
        RuntimeError: ``x`` has got a hook for its gradient. Or a layer has read ``x`` before the write, and gradients
            are needed: layers keep the input for their backward pass, and compiled ones do not notice that it has
            changed.
    """
    x, product = _traced(context, "x"), _traced(context, "product")
    if "register_hook" in str(context.get_local("x").as_proxy().node.target):
        raise RuntimeError(f"{_OBSERVED}, in compiled code. {_WHY_OBSERVED}")
    if _versions.get(product) == _versions_now(context):
        _read[x] = x._version
        _uses.latest_is_first = product not in _uses.used
        _uses.used[product] = True
        return
    what = "symm_overlap.nn: a module writes to the input that its linear layers share, or to their parameters"
    if product.requires_grad and _read.get(x, x._version) != x._version:
        raise RuntimeError(
            f"{what}, after one of these layers has read the input: in compiled code its gradient would be wrong. "
            "Write to a copy of the input instead"
        )
    context.graph_break(f"{what}, before it calls them. Their products were computed with the gather, so they are old")


def _versions_now(context: Any) -> tuple[int, ...]:
    names = ["x", "weight", "product", *([] if context.get_local("bias").is_python_constant() else ["bias"])]
    return tuple(_traced(context, name)._version for name in names)


def _traced(context: Any, name: str) -> Tensor:
    """Return the fake tensor that stands for a local variable of the caller."""
    tensor: Tensor = context.get_local(name).as_fake()
    return tensor


def _circumstances(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """Return everything that a product and its gradient depend on, except the identity of these tensors.

    A checkpoint around the layer alone runs the layer again when the product is gone. So the first run inside it must
    not use the product either: saved-tensor hooks that differ tell the two apart.
    """
    if compiling():  # a module with graph breaks, of which this function is traced alone
        return ()
    tensors = (x, weight) if bias is None else (x, weight, bias)
    frozen = [not each.requires_grad for each in tensors]
    # A DTensor and its local part count the writes to each of them.
    counting = (*tensors, *(own_part(each) for each in tensors if isinstance(each, DTensor)))
    versions = [0 if each.is_inference() else each._version for each in counting]
    return torch.is_grad_enabled(), _autocast_dtype(x), saved_tensors_hooks(), *versions, *frozen


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts matmuls on the device of ``x``, or None without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
