"""``fused_all_gather_weight_matmul``: multiply with a weight of which every rank has a shard, shard by shard.

Problem: in fully sharded data parallelism the weight of a layer is gathered before the layer runs. There must be memory
    for all of it, and the gather of the first layer is exposed.

Algorithm: a shard of the weight produces some columns of the product, or a summand of the whole product. So each shard
    can be multiplied as it arrives and then discarded. The op runs
    `symm_overlap.collective.planners.all_gather_consume`, with a ring of two chunks if the shards have to be copied.
    The gradient of the input gathers the shards once more and multiplies with the transposed weight. The gradient of
    the weight is a matmul-reduce-scatter (`weight_grad_reduce_scatter`).

Routing: `symm_overlap.collective.choosing.chooser`. The choice depends on the weight alone, because ranks may have
    different numbers of rows, as in data parallelism.
Example: ``y = torch.ops.symm_overlap.fused_all_gather_weight_matmul(x, W_shard, 0, True, group.group_name)``.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import Group, dimension, group_name, remembered, require_reduce_op, require_tensors
from ..dispatch.autograd import call_op, factors_to_keep
from ..dispatch.functional import functional
from ..dispatch.registration import define
from ..exchange import Call, Peers, exchange_of
from ..layouts import PartsLayout
from ..parts.scattered import matrix
from ..parts.weights import WeightProducts
from ..problem import OPS, OpKind, Problem, problem

OPS["all_gather_weight_matmul"] = OpKind(gathers=True, multiplies=True, moves_weight=True)


@functional
def all_gather_weight_matmul(
    X: Tensor,
    W_shard: Tensor,
    gather_dim: int,
    group: Group,
    *,
    transpose: bool = False,
    grad_reduce_op: str = "sum",
) -> Tensor:
    """Multiply ``X`` with a weight that is sharded over the ranks. Equivalent to::

        W = all_gather(W_shard, gather_dim, group)      # cat of every rank's shard along gather_dim
        return X @ (W.t() if transpose else W)

    The gathered weight never exists, except on the path "c10d" and, on CUDA, on the path "sequential". CPU ranks
    multiply with the shards of their peers in place. GPUs copy one chunk while they multiply with the previous one.

    Args:
        X: (..., K), with any number of rows, which may differ between ranks; float32, float64, bfloat16 or float16, on
            CPU or CUDA.
        W_shard: this rank's shard, a matrix with the same shape on every rank. The call is fastest if it is contiguous.
            Peers read shards in symmetric memory of the group (`symm_overlap.empty`) in place.
        gather_dim: dimension of the weight: 0 or 1 (or -1, -2).
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        transpose: False for a weight (K, N); True for a weight (N, K), as in ``nn.Linear``.
        grad_reduce_op: how the ranks' gradients of a shard are reduced, "sum" or "avg". With "avg" the sum is divided
            before it is rounded, since a sum in float16 may overflow.

    Returns:
        (..., N), contiguous. If each shard contracts a part of K, the partial products are added up, in float32 for
        bfloat16 and float16.

    The gradient of a shard is the sum over all ranks, which is the exact gradient, or the mean with "avg". For the
    backward pass autograd keeps only ``X`` and the shard.

    Raises:
        ValueError, TypeError: an argument is invalid. Raised before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not arrive before the deadline
            (`symm_overlap.timeout`).
    """
    op = torch.ops.symm_overlap.fused_all_gather_weight_matmul.default
    product: Tensor = call_op(op, X, W_shard, gather_dim, transpose, group_name(group), grad_reduce_op)
    return product


def _require(
    X: Tensor, W_shard: Tensor, gather_dim: int, transpose: bool, grad_reduce_op: str, world: int
) -> tuple[int, list[int]]:
    """Return the dimension, and the shape of the whole weight."""
    require_tensors([("X", X), ("W_shard", W_shard)])
    require_reduce_op(grad_reduce_op, "grad_reduce_op")
    if W_shard.dim() != 2:
        raise ValueError(f"W_shard of shape {tuple(W_shard.shape)} must be a matrix")
    gather_dim = dimension("gather_dim", gather_dim, W_shard.shape)
    whole = list(W_shard.shape)
    whole[gather_dim] *= world
    contracted = whole[1 if transpose else 0]
    if X.dim() < 1 or X.shape[-1] != contracted:
        raise ValueError(
            f"X of shape {tuple(X.shape)} does not match the weight of shape {tuple(whole)}"
            f"{', transposed' if transpose else ''}: its last dimension must be {contracted}"
        )
    return gather_dim, whole


@remembered
def _described(
    X: Tensor, W_shard: Tensor, gather_dim: int, transpose: bool, grad_reduce_op: str, world: int
) -> tuple[Problem, PartsLayout, list[int]]:
    """Return the problem, the layout of the shards in the weight, and the shape of the product."""
    gather_dim, (rows, columns) = _require(X, W_shard, gather_dim, transpose, grad_reduce_op, world)
    last = gather_dim == 1
    described = problem(
        "all_gather_weight_matmul",
        rows,
        columns,
        0,
        W_shard.dtype,
        world,
        W_shard.device.type,
        last_dim=last,
        arguments=(W_shard.shape, ("gather_dim", gather_dim), ("transpose", transpose)),
    )
    layout = PartsLayout(W_shard.shape[0], W_shard.shape[1], world, last)
    return described, layout, [*X.shape[:-1], rows if transpose else columns]


def _eager(
    peers: Peers, X: Tensor, W_shard: Tensor, gather_dim: int, transpose: bool, grad_reduce_op: str = "sum"
) -> Tensor:
    described, layout, shape = _described(X, W_shard, gather_dim, transpose, grad_reduce_op, peers.world)
    shard, rows = W_shard.contiguous(), matrix(X)
    call = Call(peers, described, shard.device, shard)
    output = call.backend.new_output(X, *shape)
    target = matrix(output)
    consumer = WeightProducts(call.backend, layout, rows, transpose, target, call.choice.chunks, call.rank)
    exchange_of(call).all_gather(call, layout, shard, consumer, None)
    consumer.finish()
    return output


def _fake(
    world: int, X: Tensor, W_shard: Tensor, gather_dim: int, transpose: bool, grad_reduce_op: str = "sum"
) -> Tensor:
    _, whole = _require(X, W_shard, gather_dim, transpose, grad_reduce_op, world)
    return X.new_empty([*X.shape[:-1], whole[0 if transpose else 1]])


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    X, W_shard, ctx.gather_dim, ctx.transpose, ctx.group_name, ctx.grad_reduce_op = inputs
    ctx.save_for_backward(*factors_to_keep(X, W_shard))


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    X, W_shard = ctx.saved_tensors
    needs_X, needs_W = ctx.needs_input_grad[:2]
    ops, dim, transpose, name = torch.ops.symm_overlap, ctx.gather_dim, ctx.transpose, ctx.group_name
    reduce_op = ctx.grad_reduce_op  # second gradients of the weight are reduced in the same way
    grad_X = grad_W = None
    if needs_X:
        grad_X = ops.fused_all_gather_weight_matmul(grad, W_shard, dim, not transpose, name, reduce_op)
    if needs_W:
        left, right = (grad, X) if transpose else (X, grad)
        grad_W = ops.weight_grad_reduce_scatter(left, right, reduce_op, dim, name)
    return grad_X, grad_W, None, None, None, None


def _flop(X: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """Return 2 * rows * columns * contracted size."""
    return int(2 * prod(out_shape) * X[-1])


define(
    "fused_all_gather_weight_matmul",
    "(Tensor X, Tensor W_shard, int gather_dim, bool transpose, str group_name, str grad_reduce_op='sum') -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    multiplies=True,
    flop=_flop,
)
