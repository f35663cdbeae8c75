"""``fused_scaled_matmuls_reduce_scatter_keep``: `scaled_matmuls_reduce_scatter` that also returns some of this rank's
products, their sum, or both.

Problem: as for `matmuls_reduce_scatter_keep`, with float8 numbers. For example, selective checkpointing saves products
    of ``torch._scaled_mm``.

Algorithm: as for `scaled_matmuls_reduce_scatter`. The code that computes a chunk also copies it to its place in the
    whole product. Equivalent to::

        products = [A @ B * A_scale * B_scale + bias for A, B, A_scale, B_scale, bias in zip(...)]
        total = sum(products) + addend
        output = reduce_scatter(total, reduce_op, scatter_dim, group)
        return output, [products[index] for index in keep], (total if keep_sum else None)

Routing: `symm_overlap.collective.choosing.chooser`, as for a scaled matmul-reduce-scatter.
Example: ``Y, (product,), _ = torch.ops.symm_overlap.fused_scaled_matmuls_reduce_scatter_keep([A], [B], [a], [b],
    [None], [None], None, "sum", 0, group.group_name, torch.bfloat16, [False], keep=[0])``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dispatch.registration import define
from ..exchange import Peers
from ..scaled import keep_nothing, without_gradient
from . import flop
from .matmuls_reduce_scatter_keep import require_kept
from .scaled_matmuls_reduce_scatter import (
    ARGUMENTS,
    Outputs,
    fake_scaled_sum,
    scaled_sum,
    scatter_scaled_sum,
)

NAME = "fused_scaled_matmuls_reduce_scatter_keep"


def _eager(peers: Peers, *arguments: Any, keep: Sequence[int] = (), keep_sum: bool = False) -> Outputs:
    what = scaled_sum(*arguments)
    require_kept("fused_scaled_matmuls_reduce_scatter", len(what[0]), keep, keep_sum)
    return scatter_scaled_sum(peers, *what, keep, keep_sum)


def _fake(world: int, *arguments: Any, keep: Sequence[int] = (), keep_sum: bool = False) -> Outputs:
    what = scaled_sum(*arguments)
    require_kept("fused_scaled_matmuls_reduce_scatter", len(what[0]), keep, keep_sum)
    return fake_scaled_sum(world, *what, keep, keep_sum)


define(
    NAME,
    f"{ARGUMENTS}, *, int[] keep=[], bool keep_sum=False) -> (Tensor, Tensor[], Tensor?)",
    eager=_eager,
    fake=_fake,
    setup_context=keep_nothing,
    backward=without_gradient(NAME, "fused_matmuls_reduce_scatter_keep"),
    flop=flop.of_products,
)
