"""``all_gather_weight_grad``: the gradients of the weights of an all-gather-matmul that did not keep its gathered
input.

The op gathers the shards once more and consumes each chunk as it arrives. The gathered tensor never exists. Equivalent
to::

    A = all_gather(A_shard, gather_dim, group).flatten(0, -2)
    return [A.t() @ grad.flatten(0, -2) for grad in grads]

For bfloat16 and float16 the products of the chunks are added up in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...runtime import Backend, Multiply, Part, Slice, Work, tensor_of, view_of
from ..arguments import dimension, remembered, require_tensors
from ..dispatch.registration import define
from ..exchange import Call, Peers, exchange_of
from ..layouts import GatherLayout
from ..parts.described import DescribedConsumer
from ..parts.products import accumulator
from ..problem import Problem, problem


def _require(A_shard: Tensor, grads: Sequence[Tensor], gather_dim: int, world: int) -> int:
    if not grads:
        raise ValueError("grads is empty: give at least one gradient")
    require_tensors([("A_shard", A_shard), *((f"grads[{index}]", grad) for index, grad in enumerate(grads))])
    gather_dim = dimension("gather_dim", gather_dim, A_shard.shape)
    lead = list(A_shard.shape[:-1])
    if gather_dim < len(lead):
        lead[gather_dim] *= world
    for index, grad in enumerate(grads):
        if list(grad.shape[:-1]) != lead:
            raise ValueError(f"grads[{index}] of shape {tuple(grad.shape)} must have leading dimensions {tuple(lead)}")
    return gather_dim


def _weight_rows(A_shard: Tensor, gather_dim: int, world: int) -> int:
    return A_shard.shape[-1] * (world if gather_dim == A_shard.dim() - 1 else 1)


class WeightGradients(DescribedConsumer):
    """Compute ``total += gathered.t() @ grad`` for each gradient. The totals start at 0."""

    accumulates = True

    def __init__(
        self, backend: Backend, layout: GatherLayout, grads: Sequence[Tensor], totals: Sequence[Tensor]
    ) -> None:
        self.backend, self.layout, self.grads, self.outputs = backend, layout, grads, totals
        self.operands = *grads, *totals

    def part_work(self, rank: int, start: int, part: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.part_work`."""
        layout, rows, columns = self.layout, view_of(part, Tensor.t), tensor_of(part).shape[1]
        first = start if layout.last else rank * layout.rows + start
        top = rank * columns if layout.last else 0
        return [
            Multiply(rows, Slice(grad, 0, first, tensor_of(part).shape[0]), Slice(total, 0, top, columns), True)
            for grad, total in zip(self.grads, self.outputs, strict=True)
        ]

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.work`."""
        rows = view_of(whole, Tensor.t)
        return [Multiply(rows, grad, total, True) for grad, total in zip(self.grads, self.outputs, strict=True)]


@remembered
def _described(
    A_shard: Tensor, grads: Sequence[Tensor], gather_dim: int, world: int
) -> tuple[Problem, GatherLayout, int]:
    """Return the problem, the layout, and the number of rows of the weights."""
    gather_dim = _require(A_shard, grads, gather_dim, world)
    layout = GatherLayout(A_shard.shape, gather_dim, world)
    rows = _weight_rows(A_shard, gather_dim, world)
    described = problem(
        "all_gather_matmul",
        layout.total_rows,
        sum(grad.shape[-1] for grad in grads),
        rows,
        A_shard.dtype,
        world,
        A_shard.device.type,
        last_dim=layout.last,
        one_matmul=False,
        arguments=(("gradient of", "weights"), A_shard.shape, ("grads", len(grads)), ("gather_dim", gather_dim)),
        own=tuple(grad.shape for grad in grads),
    )
    return described, layout, rows


def _eager(peers: Peers, A_shard: Tensor, grads: Sequence[Tensor], gather_dim: int) -> list[Tensor]:
    described, layout, rows = _described(A_shard, grads, gather_dim, peers.world)
    shard = layout.flat_shard(A_shard)
    call = Call(peers, described, shard.device, shard)
    totals = [accumulator(A_shard.new_empty(rows, grad.shape[-1])).zero_() for grad in grads]
    consumer = WeightGradients(call.backend, layout, [layout.flat_product(grad) for grad in grads], totals)
    exchange_of(call).all_gather(call, layout, shard, consumer, None)
    return [total.to(A_shard.dtype) for total in totals]


def _fake(world: int, A_shard: Tensor, grads: Sequence[Tensor], gather_dim: int) -> list[Tensor]:
    gather_dim = _require(A_shard, grads, gather_dim, world)
    rows = _weight_rows(A_shard, gather_dim, world)
    return [A_shard.new_empty(rows, grad.shape[-1]) for grad in grads]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    A_shard, grads, ctx.gather_dim, ctx.group_name = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(A_shard, *grads)


def _backward(ctx: Any, grad_weights: Sequence[Tensor | None]) -> tuple[Any, ...]:
    # W_i = A.t() @ G_i, so dA = sum G_i @ dW_i.t(), scattered back to the shards, and dG_i = A @ dW_i.
    A_shard, *grads = ctx.saved_tensors
    given = [(index, grad) for index, grad in enumerate(grad_weights) if grad is not None]
    none: list[Tensor | None] = [None] * len(grads)
    if not given:
        return None, none, None, None
    ops = torch.ops.symm_overlap
    dim = ctx.gather_dim % A_shard.dim()
    factors = [grad for _, grad in given]
    grad_shard = ops.fused_matmuls_reduce_scatter(
        [grads[index] for index, _ in given], [factor.t() for factor in factors], None, "sum", dim, ctx.group_name
    )
    _, products = ops.fused_all_gather_matmul(A_shard, factors, dim, ctx.group_name, return_A=False)
    for (index, _), product in zip(given, products, strict=True):
        none[index] = product
    return grad_shard, none, None, None


def _flop(A_shard: Any, grads: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """Return 2 * rows * columns * contracted size, summed over the gradients.

    Every gathered row of a gradient is multiplied with every row of the weight.
    """
    return sum(2 * prod(grad) * int(weight[0]) for grad, weight in zip(grads, out_shape, strict=True))


define(
    "all_gather_weight_grad",
    "(Tensor A_shard, Tensor[] grads, int gather_dim, str group_name) -> Tensor[]",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    multiplies=True,
    flop=_flop,
)
