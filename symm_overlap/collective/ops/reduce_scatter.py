"""``reduce_scatter``: sum over ranks and scatter along any dimension, without a matmul.

Every rank sums its part straight out of the peers' memory, in rank order, and accumulates in float32 (float64 for
double).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import (
    Group,
    dimension,
    group_name,
    remembered,
    require_divisible,
    require_reduce_op,
    require_tensors,
)
from ..dispatch.autograd import call_op
from ..dispatch.functional import functional
from ..dispatch.registration import define, size_of_group
from ..exchange import Peers
from ..problem import OPS, OpKind
from ..sum_dtypes import SumDtypes, sum_dtypes
from .matmul_reduce_scatter import Scattered, describe_scatter, scatter_sum, scattered_shape

OPS["reduce_scatter"] = OpKind()


@functional
def reduce_scatter(
    X: Tensor, reduce_op: str, scatter_dim: int, group: Group, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Sum over ranks and scatter along ``scatter_dim``: rank r gets part r. Equivalent to::

        return all_reduce(X.to(out_dtype or X.dtype), reduce_op, group).chunk(world, scatter_dim)[rank]

    Args:
        X: with the same shape on every rank; float32, float64, bfloat16 or float16, on CPU or CUDA.
        reduce_op: "sum" or "avg".
        scatter_dim: any dimension whose size is a multiple of the world size.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        out_dtype: the dtype of the result: that of ``X``, which is the default, or float32 for sums of bfloat16 and
            float16. ``X`` is sent in its own dtype, unless `sum_order` lets the library add.

    Returns:
        This rank's part, contiguous. It has the same bits in every run unless `sum_order` says otherwise. Its gradient
        is an all-gather.

    Raises:
        ValueError, TypeError: an argument is invalid. Raised before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not arrive before the deadline
            (`symm_overlap.timeout`).
    """
    op, more = torch.ops.symm_overlap.reduce_scatter.default, {} if out_dtype is None else {"out_dtype": out_dtype}
    output: Tensor = call_op(op, X, reduce_op, scatter_dim, group_name(group), **more)
    return output


def _require(
    X: Tensor, reduce_op: str, scatter_dim: int, world: int, out_dtype: torch.dtype | None
) -> tuple[int, SumDtypes]:
    require_tensors([("X", X)])
    require_reduce_op(reduce_op)
    scatter_dim = dimension("scatter_dim", scatter_dim, X.shape)
    require_divisible(scatter_dim, X.shape, world)
    return scatter_dim, sum_dtypes(X.dtype, 0, out_dtype=out_dtype)


@remembered
def _described(X: Tensor, reduce_op: str, scatter_dim: int, world: int, out_dtype: torch.dtype | None) -> Scattered:
    scatter_dim, dtypes = _require(X, reduce_op, scatter_dim, world, out_dtype)
    return describe_scatter("reduce_scatter", [], [], [], X, X.shape, reduce_op, scatter_dim, world, dtypes=dtypes)


def _eager(
    peers: Peers, X: Tensor, reduce_op: str, scatter_dim: int, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    return scatter_sum(peers, _described(X, reduce_op, scatter_dim, peers.world, out_dtype), [], [], [], X)


def _fake(world: int, X: Tensor, reduce_op: str, scatter_dim: int, *, out_dtype: torch.dtype | None = None) -> Tensor:
    scatter_dim, dtypes = _require(X, reduce_op, scatter_dim, world, out_dtype)
    return X.new_empty(scattered_shape(X.shape, scatter_dim, world), dtype=dtypes.output)


def _setup_context(ctx: Any, inputs: Any, output: Any, *, keyword_only_inputs: Any = None) -> None:
    X, ctx.reduce_op, ctx.scatter_dim, ctx.group_name = inputs
    ctx.dtype = X.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if ctx.reduce_op == "avg":
        grad = grad / size_of_group(ctx.group_name)
    return torch.ops.symm_overlap.all_gather(grad.to(ctx.dtype), ctx.scatter_dim, ctx.group_name), None, None, None


define(
    "reduce_scatter",
    "(Tensor X, str reduce_op, int scatter_dim, str group_name, *, ScalarType? out_dtype=None) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    repeatable=True,
)
