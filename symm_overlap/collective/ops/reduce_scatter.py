"""``reduce_scatter``: sum over ranks and scatter along any dimension, without a matmul.

Every rank sums its part straight out of the peers' memory, in rank order, accumulating in float32 (float64 for double).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import resolve_group
from .arguments import Group, check_divisible, check_reduce_op, check_tensors, dimension, group_name
from .call import Call, describe
from .library import define, functional
from .matmul_reduce_scatter import scatter_sum, scattered_shape


@functional
def reduce_scatter(X: Tensor, reduce_op: str, scatter_dim: int, group: Group) -> Tensor:
    """Sum over ranks; rank r gets part r along ``scatter_dim``. Equivalent to ``all_reduce(X).chunk(world,
    scatter_dim)[rank]``.

    Args:
        X: of one shape on all ranks; float32, float64, bfloat16 or float16, on CPU or CUDA.
        reduce_op: "sum" or "avg".
        scatter_dim: any dimension whose size is a multiple of the world size.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).

    Returns:
        This rank's part, contiguous; the same bits in every run. Its gradient is an all-gather.

    Raises:
        ValueError, TypeError: bad arguments, before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not come before the deadline
        (`symm_overlap.timeout`).
    """
    output: Tensor = torch.ops.symm_overlap.reduce_scatter(X, reduce_op, scatter_dim, group_name(group))
    return output


def _check(X: Tensor, reduce_op: str, scatter_dim: int, world: int) -> int:
    check_tensors([("X", X)])
    check_reduce_op(reduce_op)
    scatter_dim = dimension("scatter_dim", scatter_dim, X)
    check_divisible(scatter_dim, X.shape, world)
    return scatter_dim


def _eager(X: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    group = resolve_group(group_name)
    scatter_dim = _check(X, reduce_op, scatter_dim, group.size())
    with Call("reduce_scatter", group, X, 0, 0, 0, 0, lambda: f"({describe(X)}, {reduce_op}, {scatter_dim=})") as call:
        return scatter_sum(call, [], [], X, X.shape, scatter_dim, reduce_op == "avg")


def _fake(X: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    world = resolve_group(group_name).size()
    return X.new_empty(scattered_shape(X.shape, _check(X, reduce_op, scatter_dim, world), world))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.reduce_op, ctx.scatter_dim, ctx.group_name = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if ctx.reduce_op == "avg":
        grad = grad / resolve_group(ctx.group_name).size()
    return torch.ops.symm_overlap.all_gather(grad, ctx.scatter_dim, ctx.group_name), None, None, None


define(
    "reduce_scatter",
    "(Tensor X, str reduce_op, int scatter_dim, str group_name) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
