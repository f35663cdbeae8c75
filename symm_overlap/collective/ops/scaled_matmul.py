"""torch's float8 ops on CPU: gather, then ``torch._scaled_mm``; and ``torch._scaled_mm``, then a reduce-scatter.

For programs written for torch's ops, which `symm_mem_names` serves under their names; there are no ops of our own. No
CPU multiplies float8 fast enough for chunks to hide anything.

A scale of ``A`` is one number for the whole tensor, or one for each row: (..., 1), with the leading dimensions of the
shard (each rank has those of its rows) or of the gathered tensor (every rank has all).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._torch import resolve_group, scalar_types_to_dtypes, scaled_mm
from ...settings import current
from ..arguments import dimension, require_matmul
from ..exchange import Call, Peers, exchange_of
from ..layouts import GatherLayout, PartsLayout
from ..problem import problem
from .reduce_scatter import reduce_scatter


def all_gather_scaled_matmul(
    A_shard: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | int | None],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    """``torch.ops.symm_mem.fused_all_gather_scaled_matmul``: gather, then ``torch._scaled_mm`` by each weight.

    Raises:
        ValueError: sizes or lengths do not fit; before any communication.
    """
    world = resolve_group(group_name).size()
    lists = {"B_scales": B_scales, "biases": biases, "result_scales": result_scales, "out_dtypes": out_dtypes}
    for name, values in {**lists, "use_fast_accum": use_fast_accum}.items():
        if len(values) != len(Bs):
            raise ValueError(
                f"{name} has {len(values)} entries and Bs has {len(Bs)}: there must be one for each weight"
            )
    require_matmul("A_shard", A_shard, 1, [])
    layout = GatherLayout(A_shard.shape, dimension("gather_dim", gather_dim, A_shard), world)
    rows = A_shard.shape[-1] * (world if layout.last else 1)
    require_matmul("A_shard", A_shard, rows, [(f"Bs[{index}]", B) for index, B in enumerate(Bs)])
    of_shard = _scales_rows_of_shard(A_shard, A_scale, layout)

    flat = _gather_rows(A_shard, layout, group_name)
    if of_shard:
        A_scale = _gather_rows(A_scale, GatherLayout(A_scale.shape, layout.gather_dim, world), group_name)
    elif A_scale.numel() > 1:
        A_scale = layout.flat_product(A_scale)
    products = [
        scaled_mm(flat, B, A_scale, B_scale, bias, result_scale, dtype, fast)
        for B, B_scale, bias, result_scale, dtype, fast in zip(
            Bs, B_scales, biases, result_scales, scalar_types_to_dtypes(out_dtypes), use_fast_accum, strict=True
        )
    ]
    return layout.gathered(flat), [layout.product(product) for product in products]


def _scales_rows_of_shard(A_shard: Tensor, A_scale: Tensor, layout: GatherLayout) -> bool:
    """Whether there is a scale for each row of the shard; else there is one for all, or one for each gathered row."""
    whole = [*A_shard.shape[:-1], 1]
    if not layout.last:
        if A_scale.shape == (*A_shard.shape[:-1], 1):  # also of a single row: torch takes it so too
            return True
        whole[layout.gather_dim] *= layout.world
    if A_scale.numel() == 1 or list(A_scale.shape) == whole:
        return False
    raise ValueError(
        f"A_scale of shape {tuple(A_scale.shape)} does not match A_shard of shape {tuple(A_shard.shape)}: "
        f"allowed are one number, or one for each gathered row, {tuple(whole)}"
        + ("" if layout.last else f", or one for each row of the shard, {(*A_shard.shape[:-1], 1)}")
    )


def _gather_rows(tensor: Tensor, layout: GatherLayout, group_name: str) -> Tensor:
    """The gathered tensor, flat, of any dtype: bytes are what travels."""
    shard = layout.flat_shard(tensor)
    gathered = layout.new_gathered(shard)
    parts = PartsLayout(layout.rows, layout.columns * shard.element_size(), layout.world, layout.last)
    flat = shard.view(torch.uint8)
    arguments = (tensor.shape, ("gather_dim", layout.gather_dim), ("bytes of", str(tensor.dtype)))
    columns = parts.columns * (parts.world if parts.last else 1)
    described = problem(
        "all_gather",
        parts.total_rows,
        columns,
        0,
        flat.dtype,
        layout.world,
        flat.device.type,
        last_dim=parts.last,
        arguments=arguments,
    )
    call = Call(Peers(group_name, current()), described, flat.device, flat)
    exchange_of(call).all_gather(call, parts, flat, None, gathered.view(torch.uint8))
    return gathered


def scaled_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """``torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter``: ``torch._scaled_mm``, then a reduce-scatter.

    ``output_shape`` is the shape of the product before it is scattered, along ``orig_scatter_dim``.

    Raises:
        ValueError, TypeError: sizes do not fit, or ``out_dtype`` is none that can be summed; before any communication.
    """
    require_matmul("A", A, A.shape[-1] if A.dim() else 0, [("B", B)])
    if A_scale.numel() != 1 and A_scale.shape != (*A.shape[:-1], 1):
        raise ValueError(
            f"A_scale of shape {tuple(A_scale.shape)} does not match A of shape {tuple(A.shape)}: "
            f"allowed are one number, or one for each row, {(*A.shape[:-1], 1)}"
        )
    scale = A_scale.flatten(0, -2).contiguous() if A_scale.numel() > 1 else A_scale
    product = scaled_mm(A.flatten(0, -2).contiguous(), B, scale, B_scale, bias, result_scale, out_dtype, use_fast_accum)
    shape = A.shape[:-1] if output_shape is None else output_shape[:-1]
    return reduce_scatter(product.view(*shape, B.shape[1]), reduce_op, orig_scatter_dim, group_name)
