"""``fused_all_gather_matmul``: all-gather a sharded activation and multiply it with one or more weights, chunk by
chunk.

Problem: in tensor parallelism with sequence parallelism, every column-parallel layer first gathers its input, and the
    matmul waits for the gather.

Algorithm: after torch's asynchronous tensor parallelism (micro-pipelined all-gather-matmul on symmetric memory), with
    three differences: the local shard is multiplied first and read in place, signals replace barriers, and the gathered
    copy is created only if the caller wants it. See `symm_overlap.collective.planners.all_gather_consume`. The gradient
    of the input is a matmul-reduce-scatter. If the gathered input was returned, it is kept and used for the gradients
    of the weights. Otherwise they need a second gather, which is consumed chunk by chunk.

Routing: `symm_overlap.collective.choosing.chooser`.
Example: ``Y = torch.ops.symm_overlap.fused_all_gather_matmul(A_shard, [B], 0, group.group_name)[1][0]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arguments import Group, dimension, group_name, remembered, require_matmul, require_tensors
from ..biases import Biases, gradients, named, one_each, require_biases, without_none
from ..dispatch.autograd import call_op
from ..dispatch.functional import functional
from ..dispatch.registration import define
from ..exchange import Call, Peers, exchange_of
from ..layouts import GatherLayout, reference_gathered, reference_product
from ..parts.products import Products, SummedProducts
from ..problem import OPS, OpKind, Problem, problem
from . import flop
from .product import product_of_rows

OPS["all_gather_matmul"] = OpKind(gathers=True, multiplies=True, fused=True)


@functional
def all_gather_matmul(
    A_shard: Tensor,
    Bs: Sequence[Tensor],
    gather_dim: int,
    group: Group,
    *,
    return_A: bool = True,
    save: str | None = None,
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor | None, list[Tensor]]:
    """Gather ``A_shard`` along ``gather_dim`` and multiply the gathered tensor with every weight. Equivalent to::

        A = all_gather(A_shard, gather_dim, group)      # cat of every rank's shard along gather_dim
        return (A if return_A else None), [A @ B + bias for B, bias in zip(Bs, biases)]

    Args:
        A_shard: (..., M, K), this rank's shard, with the same shape on every rank; float32, float64, bfloat16 or
            float16, on CPU or CUDA. The call is fastest if ``A_shard.movedim(gather_dim, 0)`` is contiguous. Peers read
            the shard in place if it is in symmetric memory of the group (`symm_overlap.empty`; the same tensor on every
            rank).
        Bs: weights (K, N_i), or (world * K, N_i) if ``gather_dim`` is the last dimension. N_i may differ between ranks.
        gather_dim: any dimension of ``A_shard``.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        return_A: whether to return the gathered tensor. If False, CPU ranks that can reach each other's memory never
            create it: they read the shards of their peers in place.
        save: what autograd keeps for the gradients of the weights. "gathered" keeps the gathered tensor. "shard" keeps
            only the shard, and the backward pass gathers again. Default: "gathered" if ``return_A``, else "shard".
        biases: (N_i,) or None, for each weight; added before the product is rounded. By default there are none. Only
            some ranks may have them.

    Returns:
        The gathered tensor or None, and the products, with the values and strides of torch's
        ``symm_mem.fused_all_gather_matmul``.

    Raises:
        ValueError, TypeError: an argument is invalid. Raised before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not arrive before the deadline
            (`symm_overlap.timeout`).
    """
    if save not in (None, "gathered", "shard"):
        raise ValueError(f"save is {save!r}: allowed are 'gathered' and 'shard'")
    if isinstance(Bs, Tensor):
        raise TypeError("Bs is a tensor: give a list of weights, as in [B]")
    name = group_name(group)
    # Both ops can return the gathered tensor. The first one also keeps it for the backward pass.
    op = torch.ops.symm_overlap.fused_all_gather_matmul.default
    if return_A and save == "shard":
        op = torch.ops.symm_overlap._fused_all_gather_matmul_save_shard.default
    given = without_none(biases, Bs)
    A, outputs = call_op(op, A_shard, list(Bs), gather_dim, name, given, return_A=return_A or save == "gathered")
    return (A if return_A else None), outputs


def _require(A_shard: Tensor, Bs: Sequence[Tensor], gather_dim: int, biases: Biases, world: int) -> int:
    names = [(f"Bs[{index}]", B) for index, B in enumerate(Bs)]
    if not names:
        raise ValueError("Bs is empty: give at least one weight, or call symm_overlap.all_gather")
    require_tensors([("A_shard", A_shard), *names])
    require_matmul("A_shard", A_shard, 1, [])
    gather_dim = dimension("gather_dim", gather_dim, A_shard.shape)
    last = gather_dim == A_shard.dim() - 1
    require_matmul(
        "the gathered A_shard" if last else "A_shard", A_shard, A_shard.shape[-1] * (world if last else 1), names
    )
    require_biases(("A_shard", A_shard), names, biases)
    return gather_dim


@remembered
def _described(
    A_shard: Tensor, Bs: Sequence[Tensor], gather_dim: int, biases: Biases, return_A: bool, world: int
) -> tuple[Problem, GatherLayout]:
    gather_dim = _require(A_shard, Bs, gather_dim, biases, world)
    layout = GatherLayout(A_shard.shape, gather_dim, world)
    described = problem(
        "all_gather_matmul",
        layout.total_rows,
        sum(B.shape[1] for B in Bs),
        Bs[0].shape[0],
        A_shard.dtype,
        world,
        A_shard.device.type,
        last_dim=layout.last,
        arguments=(A_shard.shape, ("weights", len(Bs)), ("gather_dim", gather_dim), ("return_A", return_A)),
        own=(*(B.shape for B in Bs), *named(one_each(biases, Bs))),
    )
    return described, layout


def _eager(
    peers: Peers,
    A_shard: Tensor,
    Bs: Sequence[Tensor],
    gather_dim: int,
    biases: Biases = None,
    *,
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    described, layout = _described(A_shard, Bs, gather_dim, biases, return_A, peers.world)
    shard = layout.flat_shard(A_shard)
    call = Call(peers, described, shard.device, shard)
    backend = call.backend
    gathered = layout.new_gathered(shard) if return_A else None
    products = [backend.new_output(shard, layout.total_rows, B.shape[1]) for B in Bs]
    consumer: Products | SummedProducts
    if layout.last:
        consumer = SummedProducts(backend, layout, Bs, one_each(biases, Bs), products, peers.rank)
    else:
        consumer = Products(backend, layout, Bs, one_each(biases, Bs), products)
    exchange_of(call).all_gather(call, layout, shard, consumer, gathered)
    if isinstance(consumer, SummedProducts):
        consumer.finish()
    return (None if gathered is None else layout.gathered(gathered)), layout.products(products)


def _fake(
    world: int, A_shard: Tensor, Bs: Sequence[Tensor], gather_dim: int, biases: Biases = None, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    gather_dim = _require(A_shard, Bs, gather_dim, biases, world)
    products = [reference_product(A_shard, B.shape[1], gather_dim, world) for B in Bs]
    return (reference_gathered(A_shard, gather_dim, world) if return_A else None), products


def _setup_context(
    ctx: Any, inputs: Any, output: Any, *, keep_gathered: bool = True, keyword_only_inputs: Any = None
) -> None:
    ctx.set_materialize_grads(False)
    A_shard, Bs, ctx.gather_dim, ctx.group_name, *_ = inputs  # the biases are missing if the caller passed none
    _mark_constants(ctx, inputs, output)
    needs_Bs = any(B.requires_grad for B in Bs)
    gathered = output[0] if keep_gathered and needs_Bs else None
    ctx.kept_gathered = gathered is not None
    kept = (A_shard if gathered is None else gathered) if needs_Bs else None
    ctx.save_for_backward(kept, *(B if A_shard.requires_grad else None for B in Bs))


def _mark_constants(ctx: Any, inputs: Any, output: Any) -> None:
    """Tell torch which outputs need no gradient, although others do: products of weights that need none."""
    A_shard, Bs, _, _, *biases = inputs
    if A_shard.requires_grad:
        return
    biases = biases[0] if biases and biases[0] is not None else [None] * len(Bs)
    whole, products = output[0], output[1]
    needs = (B.requires_grad or (bias is not None and bias.requires_grad) for B, bias in zip(Bs, biases, strict=True))
    constant = [product for product, needed in zip(products, needs, strict=True) if not needed]
    ctx.mark_non_differentiable(*([] if whole is None else [whole]), *constant)


def _backward(ctx: Any, grad_A: Tensor | None, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    kept, *Bs = ctx.saved_tensors
    given = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
    needs_A, needs_Bs = ctx.needs_input_grad[:2]
    ops = torch.ops.symm_overlap
    grad_shard = None
    if needs_A and (given or grad_A is not None):
        factors = [Bs[index].t() for index, _ in given]
        products = [grad for _, grad in given]
        grad_shard = ops.fused_matmuls_reduce_scatter(products, factors, grad_A, "sum", ctx.gather_dim, ctx.group_name)
    grad_Bs: list[Tensor | None] = [None] * len(Bs)
    if given and (any(needs_Bs) if isinstance(needs_Bs, (list, tuple)) else needs_Bs):
        products = [grad for _, grad in given]
        if ctx.kept_gathered:
            weights = [product_of_rows(kept, grad, ctx.gather_dim % kept.dim()) for grad in products]
        else:
            weights = ops.all_gather_weight_grad(kept, products, ctx.gather_dim, ctx.group_name)
        for (index, _), weight in zip(given, weights, strict=True):
            grad_Bs[index] = weight
    return grad_shard, grad_Bs, None, None, *(gradients(needed, grads) for needed in ctx.needs_input_grad[4:])


_SIGNATURE = (
    "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, Tensor[]? biases=None, *, bool return_A=True) "
    "-> (Tensor?, Tensor[])"
)
for name, keep_gathered in (("fused_all_gather_matmul", True), ("_fused_all_gather_matmul_save_shard", False)):
    define(
        name,
        _SIGNATURE,
        eager=_eager,
        fake=_fake,
        setup_context=partial(_setup_context, keep_gathered=keep_gathered),
        backward=_backward,
        repeatable=True,
        gathers=True,
        multiplies=True,
        flop=flop.of_gathered_products,
    )
