"""The work of ops in FLOP: 2 * rows * columns * contracted size, for `torch.utils.flop_counter.register_flop_formula`.

The arguments are those of an op, with shapes in place of tensors.
"""

from __future__ import annotations

from math import prod
from typing import Any


def of_product(A: Any, B: Any, *_: Any, **__: Any) -> int:
    """Return the work of ``A @ B``."""
    return int(2 * prod(A) * B[1])


def of_products(As: Any, Bs: Any, *_: Any, **__: Any) -> int:
    """Return the work of ``A @ B`` for all pairs."""
    return sum(of_product(A, B) for A, B in zip(As, Bs, strict=True))


def of_gathered_products(A_shard: Any, Bs: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """Return the work of multiplying a gathered tensor with each of ``Bs``. The products are the op's second output."""
    return sum(2 * prod(product) * B[0] for B, product in zip(Bs, out_shape[1], strict=True))
