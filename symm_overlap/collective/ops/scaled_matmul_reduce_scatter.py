"""``fused_scaled_matmul_reduce_scatter``: multiply float8 tensors with scales, and reduce-scatter the product, chunk by
chunk.

Problem: as for `matmul_reduce_scatter`. On GPUs float8 halves the time of the matmul. The products travel in bfloat16,
    float16 or float32, because sums in float8 would lose too much precision.

Algorithm: as for `matmul_reduce_scatter`. ``torch._scaled_mm`` computes each chunk with the scales of its rows. Every
    rank adds the bias to its own product. `scaled_matmuls_reduce_scatter` does the same for a sum of several products.

Routing: `symm_overlap.collective.choosing.chooser`.
Example: ``Y = symm_overlap.scaled_matmul_reduce_scatter(A, B, A_scale, B_scale, "sum", 0, group)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..arguments import Group, dimension, group_name
from ..dispatch.autograd import call_op
from ..dispatch.functional import functional
from ..dispatch.registration import define
from ..exchange import Peers
from ..scaled import ScaledMatmul, Weight, keep_nothing, without_gradient
from . import flop
from .scaled_matmuls_reduce_scatter import fake_scaled_sum, scatter_scaled_sum


@functional
def scaled_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group: Group,
    *,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> Tensor:
    """Multiply with scales, sum the product over ranks, and scatter it along ``scatter_dim``. Equivalent to::

        return reduce_scatter(A @ B * A_scale * B_scale + bias, reduce_op, scatter_dim, group)

    The products are those of ``torch._scaled_mm``, in ``out_dtype``.

    Args:
        A: (..., M, K); float8_e4m3fn or float8_e5m2, on CPU or CUDA. K may differ between ranks; the other sizes may
            not.
        B: (K, N), float8. GPUs accept only a column-major one.
        A_scale: float32. One number, or (..., M, 1).
        B_scale: float32. One number, or (1, N).
        reduce_op: "sum" or "avg".
        scatter_dim: any dimension of ``A @ B`` whose size is a multiple of the world size.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        bias: (N,), which every rank adds to its product.
        result_scale: one number. It has no effect here: ``torch._scaled_mm`` multiplies (GPUs) or divides (CPU) only
            products in float8 by it, and these are never in float8.
        out_dtype: dtype of every rank's product and of the sum: bfloat16, float16 or float32.
        use_fast_accum: whether a GPU may accumulate with less precision.

    Returns:
        This rank's part, contiguous. It has the same bits in every run: products are added up in rank order, unless
        `sum_order` says otherwise, in float32. The op has no gradient.

    Raises:
        ValueError, TypeError: an argument is invalid, or ``torch._scaled_mm`` rejects it on this device. Raised before
            any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not arrive before the deadline
            (`symm_overlap.timeout`).
    """
    op, name = torch.ops.symm_overlap.fused_scaled_matmul_reduce_scatter.default, group_name(group)
    options = (None, bias, result_scale, out_dtype, use_fast_accum)
    output: Tensor = call_op(op, A, B, A_scale, B_scale, reduce_op, scatter_dim, scatter_dim, name, *options)
    return output


def _product(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    orig_scatter_dim: int,
    output_shape: Sequence[int] | None,
    bias: Tensor | None,
    result_scale: Tensor | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> ScaledMatmul:
    """Return the product, with the rows of ``output_shape`` instead of those of ``A``."""
    weight = Weight(B, B_scale, bias, result_scale, out_dtype or A.dtype, use_fast_accum)
    matmul = ScaledMatmul(A, A_scale, weight)
    shape = matmul.shape()
    rows = shape[:-1] if output_shape is None else output_shape[:-1]
    if prod(rows) != prod(shape[:-1]):
        raise ValueError(
            f"output_shape {tuple(output_shape or ())} does not match A of shape {tuple(A.shape)}: the leading "
            "dimensions of both must have the same number of rows"
        )
    dimension("orig_scatter_dim", orig_scatter_dim, (*rows, shape[-1]))
    if output_shape is None:
        return matmul
    scale = A_scale if prod(A_scale.shape) == 1 else A_scale.reshape(*rows, 1)
    return ScaledMatmul(A.contiguous().view(*rows, A.shape[-1]), scale, weight)


def _eager(
    peers: Peers,
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,  # an argument of torch's op: the same dimension as orig_scatter_dim, in A
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    options = (orig_scatter_dim, output_shape, bias, result_scale, out_dtype, use_fast_accum)
    product = _product(A, B, A_scale, B_scale, *options)
    return scatter_scaled_sum(peers, [product], None, reduce_op, orig_scatter_dim)[0]


def _fake(
    world: int,
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    options = (orig_scatter_dim, output_shape, bias, result_scale, out_dtype, use_fast_accum)
    product = _product(A, B, A_scale, B_scale, *options)
    return fake_scaled_sum(world, [product], None, reduce_op, orig_scatter_dim)[0]


define(
    "fused_scaled_matmul_reduce_scatter",
    "(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, int orig_scatter_dim, "
    "int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, Tensor? bias=None, "
    "Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=keep_nothing,
    backward=without_gradient("fused_scaled_matmul_reduce_scatter", "fused_matmul_reduce_scatter"),
    flop=flop.of_product,
)
