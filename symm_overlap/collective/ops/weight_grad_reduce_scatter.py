"""``weight_grad_reduce_scatter``: the gradient of a sharded weight. Every rank gets the gradient of its shard.

This is a matmul-reduce-scatter that contracts the rows of each rank's activations, whose number may differ between
ranks. `matmul_reduce_scatter` describes the algorithm. Equivalent to::

    reduce_scatter(X.flatten(0, -2).t() @ G.flatten(0, -2), reduce_op, scatter_dim, group)
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import remembered, require_divisible, require_reduce_op, require_tensors
from ..dispatch.registration import define, size_of_group
from ..exchange import Call, Peers, exchange_of
from ..parts.scattered import ScatteredProducts, matrix
from ..problem import OPS, OpKind, Problem, problem
from .matmul_reduce_scatter import scattered_shape

OPS["weight_grad_reduce_scatter"] = OpKind(multiplies=True, moves_weight=True)


def _require(X: Tensor, G: Tensor, reduce_op: str, scatter_dim: int, world: int) -> tuple[int, list[int]]:
    """Return the dimension, and the shape of this rank's shard."""
    require_tensors([("X", X), ("G", G)])
    if X.dim() < 1 or G.dim() < 1 or X.shape[:-1] != G.shape[:-1]:
        raise ValueError(
            f"X of shape {tuple(X.shape)} and G of shape {tuple(G.shape)} must have the same leading dimensions: "
            "they are an input (..., K) and the gradient (..., N) of its product with the weight"
        )
    require_reduce_op(reduce_op)
    shape = [X.shape[-1], G.shape[-1]]
    if not -2 <= scatter_dim < 2:
        raise ValueError(f"scatter_dim is {scatter_dim}, but a weight has dimensions -2 to 1")
    require_divisible(scatter_dim % 2, shape, world)
    return scatter_dim % 2, scattered_shape(shape, scatter_dim % 2, world)


@remembered
def _described(X: Tensor, G: Tensor, reduce_op: str, scatter_dim: int, world: int) -> tuple[Problem, int, list[int]]:
    scatter_dim, part = _require(X, G, reduce_op, scatter_dim, world)
    shape = X.shape[-1], G.shape[-1]
    described = problem(
        "weight_grad_reduce_scatter",
        *shape,
        0,
        X.dtype,
        world,
        X.device.type,
        last_dim=scatter_dim == 1,
        arguments=(shape, ("reduce_op", reduce_op), ("scatter_dim", scatter_dim)),
    )
    return described, scatter_dim, part


def _eager(peers: Peers, X: Tensor, G: Tensor, reduce_op: str, scatter_dim: int) -> Tensor:
    described, scatter_dim, part = _described(X, G, reduce_op, scatter_dim, peers.world)
    left, right = matrix(X), matrix(G)
    call = Call(peers, described, X.device)
    output = call.backend.new_output(X, *part)
    producer = ScatteredProducts(call.backend, [left.t()], [right], [None], None, scatter_dim, peers.world)
    exchange_of(call).reduce_scatter(call, producer, output, reduce_op == "avg")
    return output


def _fake(world: int, X: Tensor, G: Tensor, reduce_op: str, scatter_dim: int) -> Tensor:
    return X.new_empty(_require(X, G, reduce_op, scatter_dim, world)[1])


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    X, G, ctx.reduce_op, ctx.scatter_dim, ctx.group_name = inputs
    ctx.save_for_backward(X, G)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # W = X.t() @ G. With the gathered gradient D, dX = G @ D.t() and dG = X @ D.
    X, G = ctx.saved_tensors
    needs_X, needs_G = ctx.needs_input_grad[:2]
    if ctx.reduce_op == "avg":
        grad = grad / size_of_group(ctx.group_name)
    multiply, dim, name = torch.ops.symm_overlap.fused_all_gather_weight_matmul, ctx.scatter_dim, ctx.group_name
    grad_X = multiply(G, grad, dim, True, name) if needs_X else None
    grad_G = multiply(X, grad, dim, False, name) if needs_G else None
    return grad_X, grad_G, None, None, None


def _flop(X: Any, G: Any, *_: Any, **__: Any) -> int:
    """Return 2 * rows * columns * contracted size."""
    return int(2 * prod(X) * G[-1])


define(
    "weight_grad_reduce_scatter",
    "(Tensor X, Tensor G, str reduce_op, int scatter_dim, str group_name) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    multiplies=True,
    flop=_flop,
)
