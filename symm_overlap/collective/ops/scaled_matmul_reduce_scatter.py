"""``fused_scaled_matmul_reduce_scatter``: multiply float8 tensors with scales, and reduce-scatter the product, chunk by
chunk.

Problem: as for `matmul_reduce_scatter`; on GPUs float8 halves the time of the matmul. The products are what travels, in
    bfloat16, float16 or float32: sums in float8 would lose too much.

Algorithm: that of `matmul_reduce_scatter`; each chunk is made by ``torch._scaled_mm``, with the scales of its rows.
    Every rank adds the bias to its own product.

Routing: `symm_overlap.collective.chooser`.
Example: ``Y = symm_overlap.scaled_matmul_reduce_scatter(A, B, A_scale, B_scale, "sum", 0, group)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import (
    Group,
    Like,
    TensorLike,
    dimension,
    group_name,
    like,
    require_divisible,
    require_matmul,
    require_reduce_op,
)
from ..autograd import call_op
from ..exchange import Call, Peers, exchange_of
from ..functional import functional
from ..parts import matrix
from ..problem import OPS, Sort, problem
from ..registration import define
from ..scaled import (
    PRODUCTS,
    Weight,
    keep_nothing,
    require_multiplies,
    require_product,
    require_row_scales,
    require_scaled,
    without_gradient,
)
from ..scaled_parts import KeptScaledProduct, ScatteredScaledProduct
from .matmul_reduce_scatter import Scattered, scattered_shape

OPS["scaled_matmul_reduce_scatter"] = Sort(multiplies=True, scaled=True)


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
        result_scale: one number; ``torch._scaled_mm`` uses it for products in float8 alone.
        out_dtype: of every rank's product and of the sum: bfloat16, float16 or float32.
        use_fast_accum: whether a GPU may add up less exactly.

    Returns:
        This rank's part, contiguous. The same bits in every run: products are summed in rank order in float32. It has
        no gradient.

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


def _require(
    A: TensorLike,
    A_scale: TensorLike,
    weight: Weight,
    reduce_op: str,
    scatter_dim: int,
    output_shape: Sequence[int] | None,
    world: int,
) -> tuple[list[int], int]:
    """The shape of the product, and the dimension."""
    require_scaled(("A", A), A_scale, [("B", weight)])
    require_matmul("A", A, A.shape[-1] if A.dim() else 0, [("B", weight.B)])
    require_row_scales("A", A, A_scale, [(*A.shape[:-1], 1)])
    shape = [*(A.shape[:-1] if output_shape is None else output_shape[:-1]), weight.B.shape[1]]
    if prod(shape[:-1]) != prod(A.shape[:-1]):
        raise ValueError(
            f"output_shape {tuple(output_shape or ())} does not match A of shape {tuple(A.shape)}: its leading "
            "dimensions must have as many rows"
        )
    require_product(weight, PRODUCTS)
    require_reduce_op(reduce_op)
    scatter_dim = dimension("orig_scatter_dim", scatter_dim, Like(tuple(shape), A.dtype, A.device))
    require_divisible(scatter_dim, shape, world)
    return shape, scatter_dim


@lru_cache(maxsize=4096)
def _described(
    A: Like,
    A_scale: Like,
    weight: Weight,
    reduce_op: str,
    scatter_dim: int,
    output_shape: tuple[int, ...] | None,
    world: int,
    keep: bool,
) -> tuple[Scattered, list[int]]:
    """What is scattered, and the shape of the product."""
    shape, scatter_dim = _require(A, A_scale, weight, reduce_op, scatter_dim, output_shape, world)
    described = problem(
        "scaled_matmul_reduce_scatter",
        prod(shape[:-1]),
        shape[-1],
        A.shape[-1],
        weight.dtype,
        world,
        A.device.type,
        last_dim=scatter_dim == len(shape) - 1,
        arguments=(
            A.shape,
            weight.B.shape,
            ("output", tuple(shape)),
            ("reduce_op", reduce_op),
            ("scatter_dim", scatter_dim),
            *((("keep", True),) if keep else ()),
        ),
    )
    return Scattered(described, scatter_dim, scattered_shape(shape, scatter_dim, world), reduce_op == "avg"), shape


def multiply_and_scatter(
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
    *,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """This rank's part of the sum, and with ``keep`` its whole product. The other arguments are those of the op."""
    weight = Weight(B, B_scale, bias, result_scale, out_dtype or A.dtype, use_fast_accum)
    sizes = None if output_shape is None else tuple(output_shape)
    scattered, shape = _described(
        like(A), like(A_scale), weight.like(), reduce_op, orig_scatter_dim, sizes, peers.world, keep
    )
    require_multiplies(A, A_scale, A_scale.numel(), weight)
    if A_scale.numel() != 1:
        A_scale = matrix(A_scale)
    rows = A.contiguous().view(*shape[:-1], A.shape[-1])
    call = Call(peers, scattered.problem, A.device)
    output = call.backend.new_output(A.new_empty(0, dtype=weight.dtype), *scattered.part)
    factors = (rows, A_scale, weight, scattered.scatter_dim, peers.world)
    producer = KeptScaledProduct(call.backend, *factors) if keep else ScatteredScaledProduct(*factors)
    exchange_of(call).reduce_scatter(call, producer, matrix(output), scattered.average)
    return output, producer.product.view(shape) if isinstance(producer, KeptScaledProduct) else None


def fake_outputs(
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
    *,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `multiply_and_scatter` returns, without data."""
    weight = Weight(B, B_scale, bias, result_scale, out_dtype or A.dtype, use_fast_accum)
    shape, scatter_dim = _require(A, A_scale, weight, reduce_op, orig_scatter_dim, output_shape, world)
    output = A.new_empty(scattered_shape(shape, scatter_dim, world), dtype=weight.dtype)
    return output, A.new_empty(shape, dtype=weight.dtype) if keep else None


def _eager(peers: Peers, *arguments: Any, **options: Any) -> Tensor:
    return multiply_and_scatter(peers, *arguments, **options)[0]


def _fake(world: int, *arguments: Any, **options: Any) -> Tensor:
    return fake_outputs(world, *arguments, **options)[0]


def flop(A: Any, B: Any, *_: Any, **__: Any) -> int:
    """2 * rows * columns * contracted."""
    return int(2 * prod(A) * B[1])


SCHEMA = (
    "(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, int orig_scatter_dim, "
    "int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, Tensor? bias=None, "
    "Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> "
)
"""Arguments of the op: those of torch's."""

define(
    "fused_scaled_matmul_reduce_scatter",
    f"{SCHEMA}Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=keep_nothing,
    backward=without_gradient("fused_scaled_matmul_reduce_scatter", "fused_matmul_reduce_scatter"),
    flop=flop,
)
