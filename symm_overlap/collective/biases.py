"""The biases of an op's products: one number for each column, added before the product is rounded, as in
``torch.addmm``.

Each rank adds its own biases, and may have none, also if its peers have some. In a list of biases, an empty tensor
means that a product has none: torch differentiates no list that contains None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .arguments import require_tensors
from .problem import Arguments

Biases = Sequence[Tensor] | None
"""A bias, or an empty tensor, for each weight; None if there are no biases at all."""


def without_none(biases: Sequence[Tensor | None] | None, Bs: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the biases that a caller gave, with empty tensors in place of None. None if there are no biases at all."""
    if biases is None or (len(biases) == len(Bs) and all(bias is None for bias in biases)):
        return None
    like = next(iter(Bs), None)
    return [like.new_empty(0) if bias is None and like is not None else bias for bias in biases]  # type: ignore[misc]


def one_each(biases: Biases, Bs: Sequence[object]) -> Sequence[Tensor | None]:
    """Return a bias, or None, for each weight. Raises ValueError if there are biases, but not one for each."""
    if biases is None:
        return [None] * len(Bs)
    if len(biases) != len(Bs):
        raise ValueError(f"biases has {len(biases)} entries and Bs has {len(Bs)}: there must be one for each weight")
    return [None if tuple(bias.shape) == (0,) else bias for bias in biases]


def require_biases(like: tuple[str, Tensor], weights: Sequence[tuple[str, Tensor]], biases: Biases) -> None:
    """Require that every bias fits its weight, and has the dtype and device of ``like``.

    Raises:
        ValueError: its shape does not fit, or there is not one for each weight.
        TypeError: it has another dtype, or is on another device.
    """
    for index, (bias, weight) in enumerate(zip(one_each(biases, weights), weights, strict=True)):
        if bias is not None:
            require_bias(like, weight, (f"biases[{index}]", bias))


def require_bias(like: tuple[str, Tensor], weight: tuple[str, Tensor], bias: tuple[str, Tensor]) -> None:
    """Require what `require_biases` requires of one bias."""
    require_tensors([like, bias])
    columns = weight[1].shape[1]
    if list(bias[1].shape) != [columns]:
        raise ValueError(
            f"{bias[0]} of shape {tuple(bias[1].shape)} must have one number for each of the {columns} columns of "
            f"{weight[0]}, and no other dimension"
        )


def named(biases: Sequence[Tensor | None]) -> Arguments:
    """Return which products have a bias, as an argument of the call that may differ between ranks."""
    which = tuple(bias is not None for bias in biases)
    return (("biases", which),) if any(which) else ()


def gradient(needed: bool, grad: Tensor | None) -> Tensor | None:
    """Return the gradient of a bias from that of its product, if it is needed and there is one."""
    return grad.sum([*range(grad.dim() - 1)]) if needed and grad is not None else None


def gradients(needed: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """Return the gradients of several biases.

    Args:
        needed: torch's ``needs_input_grad`` of the biases: one bool for each, or one for all if there are none.
    """
    return list(map(gradient, needed, grads)) if isinstance(needed, (list, tuple)) else None
