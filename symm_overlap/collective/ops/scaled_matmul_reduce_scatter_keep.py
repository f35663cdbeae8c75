"""``fused_scaled_matmul_reduce_scatter_keep``: `scaled_matmul_reduce_scatter` for a caller who wants the product too.

Problem: that of `matmuls_reduce_scatter_keep`, for float8 numbers. Selective checkpointing, for one, saves products of
    ``torch._scaled_mm``.

Algorithm: that of `scaled_matmul_reduce_scatter`; whoever computes a chunk also copies it to its place in the whole
    product. Equivalent to::

        product = A @ B * A_scale * B_scale + bias
        return reduce_scatter(product, reduce_op, scatter_dim, group), product

Routing: `symm_overlap.collective.chooser`, as for a scaled matmul-reduce-scatter.
Example: ``Y, product = torch.ops.symm_overlap.fused_scaled_matmul_reduce_scatter_keep(
    A, B, A_scale, B_scale, "sum", 0, 0, group.group_name, None, out_dtype=torch.bfloat16)``.
"""

from __future__ import annotations

from functools import partial

from ..registration import define
from ..scaled import keep_nothing, without_gradient
from .scaled_matmul_reduce_scatter import SCHEMA, fake_outputs, flop, multiply_and_scatter

define(
    "fused_scaled_matmul_reduce_scatter_keep",
    f"{SCHEMA}(Tensor, Tensor)",
    eager=partial(multiply_and_scatter, keep=True),
    fake=partial(fake_outputs, keep=True),
    setup_context=keep_nothing,
    backward=without_gradient("fused_scaled_matmul_reduce_scatter_keep", "fused_matmuls_reduce_scatter_keep"),
    flop=flop,
)
