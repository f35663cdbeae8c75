"""``fused_matmuls_reduce_scatter_keep``: `matmuls_reduce_scatter` that also returns some of this rank's products, their
sum, or both.

Problem: a product that is saved for the backward pass, or used by anything else, has to be stored as a whole. If it
    were computed first and scattered then, no computation would be left to hide the exchange behind.

Algorithm: as for `matmul_reduce_scatter`, the chunk for the next rank is computed first and the local chunk last. The
    code that computes a chunk also copies it to its place in the whole product. Equivalent to::

        products = [A @ B + bias for A, B, bias in zip(As, Bs, biases)]
        total = sum(products) + addend
        output = reduce_scatter(total, reduce_op, scatter_dim, group)
        return output, [products[index] for index in keep], (total if keep_sum else None)

Routing: `symm_overlap.collective.choosing.chooser`, as for a matmul-reduce-scatter.
Example: ``Y, (product,), _ = torch.ops.symm_overlap.fused_matmuls_reduce_scatter_keep(
    [A], [B], None, "sum", 0, group.group_name, keep=[0])``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import remembered
from ..biases import Biases, gradients, one_each
from ..dispatch.registration import define, size_of_group
from ..exchange import Call, Peers, exchange_of
from ..parts.kept import KeptProducts
from ..parts.scattered import matrix
from . import flop
from .matmul_reduce_scatter import Scattered, describe_scatter, scattered_shape
from .matmuls_reduce_scatter import require_sum
from .product import product, product_of_rows

Outputs = tuple[Tensor, list[Tensor], Tensor | None]


def _require(
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    biases: Biases,
    world: int,
    keep: Sequence[int],
    keep_sum: bool,
) -> tuple[list[int], int]:
    """Return the shape of the products, and the dimension."""
    if not As:
        raise ValueError("As is empty: there is no product to keep; call symm_overlap.reduce_scatter")
    shape, scatter_dim, _ = require_sum(As, Bs, addend, reduce_op, scatter_dim, biases, world)
    require_kept("fused_matmuls_reduce_scatter", len(As), keep, keep_sum)
    return shape, scatter_dim


def require_kept(keeps_nothing: str, products: int, keep: Sequence[int], keep_sum: bool) -> None:
    """Raise ValueError if nothing is kept, or if `keep` does not name existing products, each once.

    Args:
        keeps_nothing: the op to call if nothing is to be kept.
    """
    if not keep and not keep_sum:
        raise ValueError(f"keep is empty and keep_sum is False: to keep nothing, call {keeps_nothing}")
    if len(set(keep)) < len(keep) or not all(0 <= index < products for index in keep):
        raise ValueError(f"keep is {list(keep)}: name products of As and Bs by their index, 0 to {products - 1}, once")


@remembered
def _described(
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    biases: Biases,
    world: int,
    keep: Sequence[int],
    keep_sum: bool,
) -> tuple[Scattered, list[int]]:
    shape, scatter_dim = _require(As, Bs, addend, reduce_op, scatter_dim, biases, world, keep, keep_sum)
    kept = ("keep", tuple(keep)), ("keep_sum", keep_sum)
    op = "matmul_reduce_scatter"
    return describe_scatter(op, As, Bs, one_each(biases, Bs), addend, shape, reduce_op, scatter_dim, world, kept), shape


def _eager(
    peers: Peers,
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    biases: Biases = None,
    *,
    keep: Sequence[int] = (),
    keep_sum: bool = False,
) -> Outputs:
    scattered, shape = _described(As, Bs, addend, reduce_op, scatter_dim, biases, peers.world, keep, keep_sum)
    call = Call(peers, scattered.problem, As[0].device)
    output = call.backend.new_output(As[0], *scattered.part)
    rest = addend, shape, scattered.scatter_dim, peers.world, keep, keep_sum
    producer = KeptProducts(call.backend, As, Bs, one_each(biases, Bs), *rest)
    exchange_of(call).reduce_scatter(call, producer, matrix(output), scattered.average)
    total = producer.total
    return output, [each.view(shape) for each in producer.products], None if total is None else total.view(shape)


def _fake(
    world: int,
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    biases: Biases = None,
    *,
    keep: Sequence[int] = (),
    keep_sum: bool = False,
) -> Outputs:
    shape, scatter_dim = _require(As, Bs, addend, reduce_op, scatter_dim, biases, world, keep, keep_sum)
    output = As[0].new_empty(scattered_shape(shape, scatter_dim, world))
    return output, [As[0].new_empty(shape) for _ in keep], As[0].new_empty(shape) if keep_sum else None


def _setup_context(ctx: Any, inputs: Any, output: Any, *, keyword_only_inputs: Any) -> None:
    ctx.set_materialize_grads(False)
    As, Bs, addend, ctx.reduce_op, ctx.scatter_dim, ctx.group_name, *_ = inputs  # the biases may be missing
    ctx.keep = list(keyword_only_inputs["keep"])
    ctx.products, ctx.has_addend = len(As), addend is not None
    ctx.save_for_backward(*As, *Bs)


def _backward(
    ctx: Any, grad: Tensor | None, grad_products: Sequence[Tensor | None], grad_total: Tensor | None
) -> tuple[Any, ...]:
    As, Bs = ctx.saved_tensors[: ctx.products], ctx.saved_tensors[ctx.products :]
    dim = ctx.scatter_dim % As[0].dim()
    needs_As, needs_Bs = (
        any(needed) if isinstance(needed, (list, tuple)) else needed for needed in ctx.needs_input_grad[:2]
    )
    own = {index: each for index, each in zip(ctx.keep, grad_products, strict=True) if each is not None}
    grad_As: list[Tensor | None] = [None] * ctx.products
    common = grad_total  # the gradient of the sum, whole
    if grad is not None:
        # If the gathered gradient is the only gradient of a product, the gradient of its left factor is computed with
        # the gather.
        plain = [index for index in range(ctx.products) if needs_As and index not in own and grad_total is None]
        gathered, made = _gathered(ctx, grad, dim, [Bs[index].t() for index in plain])
        for index, grad_A in zip(plain, made, strict=True):
            grad_As[index] = grad_A
        common = _sum(common, gathered)
    grad_Bs: list[Tensor | None] = [None] * ctx.products
    of_products = [_sum(common, own.get(index)) for index in range(ctx.products)]
    for index, (A, B, of_product) in enumerate(zip(As, Bs, of_products, strict=True)):
        if of_product is not None:
            if needs_As and grad_As[index] is None:
                grad_As[index] = product(of_product.flatten(0, -2), B.t()).view(A.shape)
            if needs_Bs:
                grad_Bs[index] = product_of_rows(A, of_product, dim)
    grad_biases = (gradients(needed, of_products) for needed in ctx.needs_input_grad[6:])
    return grad_As, grad_Bs, common if ctx.has_addend else None, None, None, None, *grad_biases


def _gathered(ctx: Any, grad: Tensor, dim: int, factors: list[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the gradient of what every rank summed, and its product with each of ``factors``."""
    ops = torch.ops.symm_overlap
    if ctx.reduce_op == "avg":
        grad = grad / size_of_group(ctx.group_name)
    if not factors:
        return ops.all_gather(grad, dim, ctx.group_name), []
    gathered, products = ops.fused_all_gather_matmul(grad, factors, dim, ctx.group_name)
    return gathered, products


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


define(
    "fused_matmuls_reduce_scatter_keep",
    "(Tensor[] As, Tensor[] Bs, Tensor? addend, str reduce_op, int scatter_dim, str group_name, "
    "Tensor[]? biases=None, *, int[] keep=[], bool keep_sum=False) -> (Tensor, Tensor[], Tensor?)",
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    multiplies=True,
    flop=flop.of_products,
)
