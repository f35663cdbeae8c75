"""``fused_all_gather_scaled_matmul``: all-gather a sharded float8 activation and multiply it with one or more float8
weights, chunk by chunk.

Problem: as for `all_gather_matmul`. Float8 halves the bytes that travel and, on GPUs, also the time of the matmul.

Algorithm: as for `all_gather_matmul`. ``torch._scaled_mm`` multiplies each chunk with the scales of its rows. Scales
    that are sharded like the rows are gathered first, since every chunk needs some of them. If the last dimension is
    gathered, the matmul contracts it, and nothing is multiplied before the whole tensor has arrived: bias, result scale
    and rounding apply to the whole sum. One call of ``torch._scaled_mm`` then computes it.

Routing: `symm_overlap.collective.choosing.chooser`.
Example: ``Y = symm_overlap.all_gather_scaled_matmul(A_shard, [B], A_scale, [B_scale], 0, group)[1][0]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import Group, dimension, group_name, remembered, require_matmul
from ..dispatch.autograd import call_op
from ..dispatch.functional import functional
from ..dispatch.registration import define
from ..exchange import Call, Peers, exchange_of
from ..layouts import GatherLayout, reference_gathered, reference_product
from ..parts.scaled import ScaledProducts
from ..problem import OPS, OpKind, Problem, problem
from ..scaled import (
    FLOAT8,
    PRODUCTS,
    Weight,
    keep_nothing,
    require_multiplies,
    require_product,
    require_row_scales,
    require_scaled,
    weights_of,
    without_gradient,
)
from . import flop
from .all_gather import gather

OPS["all_gather_scaled_matmul"] = OpKind(gathers=True, multiplies=True, scaled=True, fused=True)


@functional
def all_gather_scaled_matmul(
    A_shard: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    group: Group,
    *,
    biases: Sequence[Tensor | None] | None = None,
    result_scales: Sequence[Tensor | None] | None = None,
    out_dtype: torch.dtype | None = torch.bfloat16,
    use_fast_accum: bool = False,
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    """Gather a float8 ``A_shard`` along ``gather_dim`` and multiply it with every weight, with scales. Equivalent to::

        A = all_gather(A_shard, gather_dim, group)      # cat of every rank's shard along gather_dim
        return (A if return_A else None), [A @ B * A_scale * B_scale + bias for B, B_scale, bias in ...]

    The products are those of ``torch._scaled_mm``, in ``out_dtype``.

    Args:
        A_shard: (..., M, K), this rank's shard, with the same shape on every rank; float8_e4m3fn or float8_e5m2, on CPU
            or CUDA.
        Bs: float8 weights (K, N_i), or (world * K, N_i) if ``gather_dim`` is the last dimension. N_i may differ between
            ranks. GPUs accept only column-major weights.
        A_scale: float32. One number; or (..., M, 1), the scales of the rows of this rank's shard; or the scales of all
            gathered rows, the same on every rank.
        B_scales: float32. For each weight one number or (1, N_i).
        gather_dim: any dimension of ``A_shard``. A gather of the last dimension cannot be hidden behind a matmul.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        biases: (N_i,) or None, for each weight.
        result_scales: one number or None, for each weight. Only products in float8 use it: as in ``torch._scaled_mm``,
            GPUs multiply by it and CPUs divide by it.
        out_dtype: dtype of the products: bfloat16, float16, float32 or float8. None means the dtype of ``A_shard``.
        use_fast_accum: whether a GPU may accumulate with less precision.
        return_A: whether to return the gathered tensor.

    Returns:
        The gathered tensor or None, and the products, with the values and strides of torch's
        ``symm_mem.fused_all_gather_scaled_matmul``. The op has no gradient.

    Raises:
        ValueError, TypeError: an argument is invalid, or ``torch._scaled_mm`` rejects it on this device. Raised before
            any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not arrive before the deadline
            (`symm_overlap.timeout`).
    """
    count, Bs = len(Bs), list(Bs)
    none: list[Tensor | None] = [None] * count
    A, outputs = call_op(
        torch.ops.symm_overlap.fused_all_gather_scaled_matmul.default,
        A_shard,
        Bs,
        A_scale,
        list(B_scales),
        gather_dim,
        group_name(group),
        none if biases is None else list(biases),
        none if result_scales is None else list(result_scales),
        [out_dtype] * count,
        [use_fast_accum] * count,
        return_A=return_A,
    )
    return A, outputs


class _Described(NamedTuple):
    problem: Problem
    layout: GatherLayout
    of_shard: bool  # whether every rank has only the scales of its own rows, so that they have to be gathered


def _require(
    A_shard: Tensor, A_scale: Tensor, weights: Sequence[Weight], gather_dim: int, world: int
) -> tuple[int, bool]:
    """Return the dimension, and whether the scales are those of the shard's rows."""
    named = [(f"Bs[{index}]", weight) for index, weight in enumerate(weights)]
    require_scaled(("A_shard", A_shard), A_scale, named)
    for weight in weights:
        require_product(weight, (*PRODUCTS, *FLOAT8))
    require_matmul("A_shard", A_shard, 1, [])
    gather_dim = dimension("gather_dim", gather_dim, A_shard.shape)
    last = gather_dim == A_shard.dim() - 1
    contracted = A_shard.shape[-1] * (world if last else 1)
    name = "the gathered A_shard" if last else "A_shard"
    require_matmul(name, A_shard, contracted, [(of, weight.B) for of, weight in named])
    own, whole = (*A_shard.shape[:-1], 1), [*A_shard.shape[:-1], 1]
    if not last:
        whole[gather_dim] *= world
    require_row_scales("A_shard", A_shard, A_scale, [tuple(whole)] if last else [tuple(whole), own])
    # A scale of shape (1, 1) for a shard of one row counts as the scale of that row, as in torch.
    return gather_dim, not last and tuple(A_scale.shape) == own


@remembered
def _described(
    A_shard: Tensor, A_scale: Tensor, weights: Sequence[Weight], gather_dim: int, return_A: bool, world: int
) -> _Described:
    gather_dim, of_shard = _require(A_shard, A_scale, weights, gather_dim, world)
    layout = GatherLayout(A_shard.shape, gather_dim, world)
    columns = sum(weight.B.shape[1] for weight in weights)
    described = problem(
        # If nothing is multiplied before the whole tensor has arrived, the chooser sees a plain gather.
        "all_gather" if layout.last else "all_gather_scaled_matmul",
        layout.total_rows,
        layout.columns * world if layout.last else columns,
        0 if layout.last else layout.columns,
        A_shard.dtype,
        world,
        A_shard.device.type,
        last_dim=layout.last,
        arguments=(
            ("scaled", "rows of the shard" if of_shard else "as given"),
            A_shard.shape,
            ("weights", len(weights)),
            ("gather_dim", gather_dim),
            ("return_A", return_A),
        ),
        own=tuple(weight.B.shape for weight in weights),
    )
    return _Described(described, layout, of_shard)


def _eager(
    peers: Peers,
    A_shard: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    *rest: Sequence[Any],
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    weights = weights_of(A_shard.dtype, Bs, B_scales, *rest)
    described, layout, of_shard = _described(A_shard, A_scale, weights, gather_dim, return_A, peers.world)
    for weight in weights:
        require_multiplies(A_shard, A_scale, A_scale.numel() * (peers.world if of_shard else 1), weight)
    if of_shard:
        scales = GatherLayout(A_scale.shape, layout.gather_dim, peers.world)
        A_scale = gather(peers, scales.flat_shard(A_scale), 0)
    elif A_scale.numel() != 1:
        A_scale = layout.flat_product(A_scale)
    shard = layout.flat_shard(A_shard)
    call = Call(peers, described, shard.device, shard)
    gathered = layout.new_gathered(shard) if return_A or layout.last else None
    products = [
        call.backend.new_output(shard.new_empty(0, dtype=weight.dtype), layout.total_rows, weight.B.shape[1])
        for weight in weights
    ]
    consumer = ScaledProducts(call.backend, layout, A_scale, weights, products)
    exchange_of(call).all_gather(call, layout, shard, None if layout.last else consumer, gathered)
    if layout.last:
        assert gathered is not None
        consumer.whole(gathered)
    A = layout.gathered(gathered) if return_A and gathered is not None else None
    return A, layout.products(products)


def _fake(
    world: int,
    A_shard: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    *rest: Sequence[Any],
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    weights = weights_of(A_shard.dtype, Bs, B_scales, *rest)
    gather_dim, _ = _require(A_shard, A_scale, weights, gather_dim, world)
    products = [reference_product(A_shard, weight.B.shape[1], gather_dim, world, weight.dtype) for weight in weights]
    return (reference_gathered(A_shard, gather_dim, world) if return_A else None), products


define(
    "fused_all_gather_scaled_matmul",
    "(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int gather_dim, str group_name, "
    "Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum, *, "
    "bool return_A=True) -> (Tensor?, Tensor[])",
    eager=_eager,
    fake=_fake,
    setup_context=keep_nothing,
    backward=without_gradient("fused_all_gather_scaled_matmul", "fused_all_gather_matmul"),
    flop=flop.of_gathered_products,
)
