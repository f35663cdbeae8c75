"""The dtypes of a sum over ranks: in which this rank's terms are added and sent, and which the result has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


def sent_in(dtype: torch.dtype, output: torch.dtype) -> torch.dtype:
    """Return the dtype in which a term of a sum is sent: its own, if no bit of the sum depends on that, else that of
    the sum.
    """
    return dtype if dtype in HALVES and output == torch.float32 else output


class SumDtypes(NamedTuple):
    """The dtypes of ``reduce_scatter((sum((A @ B).to(parts) for A, B) + addend.to(parts)).to(output))``.

    Attributes:
        factors: the dtype of every A, B and product.
        parts: the dtype in which this rank's terms are added, and sent to the peers.
        output: the dtype of the result. All ranks' parts are added in float32 or wider, and rounded to it once.
    """

    factors: torch.dtype
    parts: torch.dtype
    output: torch.dtype

    @property
    def named(self) -> tuple[tuple[str, torch.dtype], ...]:
        """What is not the same dtype as all the rest, by name."""
        added = () if self.parts == self.factors else (("factors", self.factors),)
        return added if self.output == self.parts else (*added, ("out_dtype", self.output))


def sum_dtypes(
    factors: torch.dtype,
    products: int,
    addend: Tensor | None = None,
    sum_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> SumDtypes:
    """Return the dtypes of a sum of products and an addend.

    Args:
        factors: the dtype of the factors; that of the addend if there are no products.
        sum_dtype: in which the products are added; None: in their own.
        out_dtype: that of the result; None: ``sum_dtype``.

    Raises:
        TypeError: a dtype is neither the one before it, nor float32 after bfloat16 or float16, or the addend has
            neither ``sum_dtype`` nor the dtype of the factors.
    """
    parts = _widened("sum_dtype", sum_dtype, factors)
    output = _widened("out_dtype", out_dtype, parts)
    if addend is not None and addend.dtype not in (factors, parts):
        raise TypeError(f"addend is {addend.dtype}, and products of {factors} are added in {parts}: give one of these")
    # One term in half precision is sent as it is: all that is added to it comes from other ranks.
    alone = products + (addend is not None) <= 1
    return SumDtypes(factors, factors if alone else parts, output)


def _widened(name: str, dtype: torch.dtype | None, before: torch.dtype) -> torch.dtype:
    if dtype is None or dtype == before:
        return before
    if before not in HALVES or dtype != torch.float32:
        allowed = f"{before} or torch.float32" if before in HALVES else str(before)
        raise TypeError(f"{name} is {dtype}: for sums of {before}, it can be {allowed}")
    return dtype
