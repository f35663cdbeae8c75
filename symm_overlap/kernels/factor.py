"""The factors that rows are multiplied with in a fused kernel, and which factors fit in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Factor(NamedTuple):
    """A weight, and what is done with the product.

    Attributes:
        weight: (k, n), with any strides.
        product: (rows, n), contiguous: where the product is written, rounded to this tensor's dtype.
        scale: float32, the scale of the weight: one number, or n contiguous numbers; None: the weight is not scaled.
        bias: n contiguous numbers, or None.
        fast: whether products of 8-bit floats may be accumulated less exactly than in float32.
        result_scale: float32, one number by which the whole product is multiplied before it is rounded, or None. It is
            for products in float8. Sums over ranks are never in float8.
    """

    weight: Tensor
    product: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    fast: bool = False
    result_scale: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors besides the product."""
        return self.weight, self.scale, self.bias, self.result_scale


def launches(factors: Sequence[Factor], most: int) -> list[list[Factor]]:
    """Return the factors of each launch, up to ``most`` each. The factors of one launch share what the kernel is
    compiled for: layout, dtypes, ``fast``, and whether there are a bias and a result scale.
    """
    groups: dict[object, list[list[Factor]]] = {}
    for factor in factors:
        if factor.weight.shape[1] == 0:
            continue
        bias = None if factor.bias is None else factor.bias.dtype
        finish = factor.product.dtype, bias, factor.result_scale is None
        group = groups.setdefault((layout(factor.weight), factor.weight.dtype, factor.fast, *finish), [[]])
        if len(group[-1]) == most:
            group.append([])
        group[-1].append(factor)
    return [launch for group in groups.values() for launch in group]


def layout(weight: Tensor) -> str:
    """Return the layout of a weight: "rows" or "columns" (as of ``W.t()``) if these are contiguous, else "strided"."""
    return "rows" if weight.stride(1) == 1 else "columns" if weight.stride(0) == 1 else "strided"
