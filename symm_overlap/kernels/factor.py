"""What rows are multiplied with in a fused kernel, and which of that fits one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Factor(NamedTuple):
    """A weight, and what becomes of the product with it.

    Attributes:
        weight: (k, n), of any strides.
        product: (rows, n), contiguous: where the product goes, in its dtype.
        scale: float32, of the weight: one number, or n contiguous ones; None: it is not scaled.
        bias: n contiguous numbers, or None.
        fast: whether 8-bit floats may be added up less exactly than in float32.
        result_scale: float32, one number that everything is multiplied by before it is rounded, or None. For products
            in float8, which sums over ranks never are.
    """

    weight: Tensor
    product: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    fast: bool = False
    result_scale: Tensor | None = None


def launches(factors: Sequence[Factor], most: int) -> list[list[Factor]]:
    """The factors of each launch, up to ``most``: a kernel is compiled for what those of a launch have in common."""
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
    """Which elements of a weight lie together: "rows", "columns" as those of ``W.t()``, or neither: "strided"."""
    return "rows" if weight.stride(1) == 1 else "columns" if weight.stride(0) == 1 else "strided"
