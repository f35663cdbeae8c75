"""``fused_scaled_matmul_reduce_scatter``: multiply float8 tensors with scales, and reduce-scatter the product, chunk by
chunk.

Problem: as for `matmul_reduce_scatter`; on GPUs float8 halves the time of the matmul. The products are what travels, in
    bfloat16, float16 or float32: sums in float8 would lose too much.

Algorithm: that of `matmul_reduce_scatter`; each chunk is made by ``torch._scaled_mm``, with the scales of its rows.
    Every rank adds the bias to its own product. `scaled_matmuls_reduce_scatter` does the same for a sum of several.

Routing: `symm_overlap.collective.chooser`.
Example: ``Y = symm_overlap.scaled_matmul_reduce_scatter(A, B, A_scale, B_scale, "sum", 0, group)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import Group, Like, dimension, group_name
from ..autograd import call_op
from ..exchange import Peers
from ..functional import functional
from ..registration import define
from ..scaled import ScaledMatmul, Weight, keep_nothing, without_gradient
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
    """Multiply with scales, and scatter the sum over ranks along ``scatter_dim``. Equivalent to::

        return reduce_scatter(A @ B * A_scale * B_scale + bias, reduce_op, scatter_dim, group)

    with the products of ``torch._scaled_mm``, in ``out_dtype``.

    Args:
        A: (..., M, K), of one shape on all ranks; float8_e4m3fn or float8_e5m2, on CPU or CUDA.
        B: (K, N), float8; GPUs take a column-major one only.
        A_scale: float32: one number, or (..., M, 1).
        B_scale: float32: one number, or (1, N).
        reduce_op: "sum" or "avg".
        scatter_dim: any dimension of ``A @ B``; its size is a multiple of the world size.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        bias: (N,), which every rank adds to its product.
        result_scale: one number; ``torch._scaled_mm`` multiplies (GPUs) or divides (CPU) products in float8 by it, and
            no others, so it changes none of these.
        out_dtype: of every rank's product and of the sum: bfloat16, float16 or float32.
        use_fast_accum: whether a GPU may add up less exactly.

    Returns:
        This rank's part, contiguous. The same bits in every run: products are summed in rank order, unless `sum_order`
        says otherwise, in float32. It has no gradient.

    Raises:
        ValueError, TypeError: bad arguments, also those that ``torch._scaled_mm`` rejects on this device, before any
        communication.
        torch.distributed.DistBackendError: a peer is dead, or did not come before the deadline
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
    """The product, with the rows of ``output_shape`` in place of those of ``A``."""
    weight = Weight(B, B_scale, bias, result_scale, out_dtype or A.dtype, use_fast_accum)
    matmul = ScaledMatmul(A, A_scale, weight)
    shape = matmul.shape()
    rows = shape[:-1] if output_shape is None else output_shape[:-1]
    if prod(rows) != prod(shape[:-1]):
        raise ValueError(
            f"output_shape {tuple(output_shape or ())} does not match A of shape {tuple(A.shape)}: its leading "
            "dimensions must have as many rows"
        )
    dimension("orig_scatter_dim", orig_scatter_dim, Like((*rows, shape[-1]), A.dtype, A.device))
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
    scatter_dim_after_maybe_reshape: int,  # torch's, of A: it names the dimension that orig_scatter_dim names
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


def _flop(A: Any, B: Any, *_: Any, **__: Any) -> int:
    """2 * rows * columns * contracted."""
    return int(2 * prod(A) * B[1])


define(
    "fused_scaled_matmul_reduce_scatter",
    "(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, int orig_scatter_dim, "
    "int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, Tensor? bias=None, "
    "Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=keep_nothing,
    backward=without_gradient("fused_scaled_matmul_reduce_scatter", "fused_matmul_reduce_scatter"),
    flop=_flop,
)
