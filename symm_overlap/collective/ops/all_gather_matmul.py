"""``fused_all_gather_matmul``: all-gather a sharded activation and multiply it with one or more weights, chunk by
chunk.

Problem: in tensor parallelism with sequence parallelism every column-parallel layer first gathers its input; the matmul
    waits.

Algorithm: after torch's asynchronous tensor parallelism (micro-pipelined all-gather-matmul on symmetric memory), with
    the own shard first and read in place, signals instead of barriers, and the gathered copy made only for a caller who
    wants it; see `symm_overlap.plan.all_gather_consume`. The gradient of the input is a matmul-reduce-scatter; that of
    the weights uses the gathered input when it was returned (and so kept), else a second gather that is consumed chunk
    by chunk.

Routing: `paths`. Example: ``Y = torch.ops.symm_overlap.fused_all_gather_matmul(A_shard, [B], 0,
    group.group_name)[1][0]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch import resolve_group
from ..memory import new_output
from .arguments import Group, check_matmul, check_tensors, dimension, group_name
from .call import Call, describe
from .engine import Chunk, bounds
from .gather_layout import GatherLayout, reference_gathered, reference_product
from .library import define, functional
from .matmul_reduce_scatter import product_of_rows
from .multiply import multiply
from .sliced_matmul import multiply_shards


@functional
def all_gather_matmul(
    A_shard: Tensor,
    Bs: Sequence[Tensor],
    gather_dim: int,
    group: Group,
    *,
    return_A: bool = True,
    save: str | None = None,
) -> tuple[Tensor | None, list[Tensor]]:
    """Gather ``A_shard`` along ``gather_dim`` and multiply the whole with every weight. Equivalent to::

        A = all_gather(A_shard, gather_dim, group)      # cat of every rank's shard along gather_dim
        return (A if return_A else None), [A @ B for B in Bs]

    Args:
        A_shard: (..., M, K), this rank's shard, of one shape on all ranks; float32, float64, bfloat16 or float16, on
            CPU or CUDA. Fastest when ``A_shard.movedim(gather_dim, 0)`` is contiguous; a tensor in symmetric memory of
            the group (the same one on every rank, at any offset) is read in place by the peers.
        Bs: weights (K, N_i), or (world * K, N_i) when ``gather_dim`` is the last dimension; the same N_i on all ranks,
            since the path depends on them.
        gather_dim: any dimension of ``A_shard``.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        return_A: whether the gathered tensor is wanted. Without it none ever exists on CPU where ranks can reach each
            other's memory: peers' shards are read where they lie.
        save: what autograd keeps for the weights' gradients: "gathered" keeps the gathered tensor, "shard" gathers
            again in the backward pass. Default: "gathered" when ``return_A``, else "shard".

    Returns:
        The gathered tensor or None, and the products, with the values and strides of torch's
        ``symm_mem.fused_all_gather_matmul``.

    Raises:
        ValueError, TypeError: bad arguments, before any communication.
        torch.distributed.DistBackendError: a peer is dead, or did not come before the deadline
        (`symm_overlap.timeout`).
    """
    if save not in (None, "gathered", "shard"):
        raise ValueError(f"save is {save!r}: allowed are 'gathered' and 'shard'")
    name = group_name(group)
    # Either op returns the gathered tensor when asked to; the first one also keeps it for the backward pass.
    op = torch.ops.symm_overlap.fused_all_gather_matmul
    if return_A and save == "shard":
        op = torch.ops.symm_overlap._fused_all_gather_matmul_save_shard
    A, outputs = op(A_shard, list(Bs), gather_dim, name, return_A=return_A or save == "gathered")
    return (A if return_A else None), outputs


def _check(A_shard: Tensor, Bs: Sequence[Tensor], gather_dim: int, world: int) -> int:
    names = [(f"Bs[{index}]", B) for index, B in enumerate(Bs)]
    if not names:
        raise ValueError("Bs is empty: give at least one weight, or call symm_overlap.all_gather")
    check_tensors([("A_shard", A_shard), *names])
    check_matmul("A_shard", A_shard, 1, [])
    gather_dim = dimension("gather_dim", gather_dim, A_shard)
    last = gather_dim == A_shard.dim() - 1
    check_matmul(
        "the gathered A_shard" if last else "A_shard", A_shard, A_shard.shape[-1] * (world if last else 1), names
    )
    return gather_dim


def _eager(
    A_shard: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    group = resolve_group(group_name)
    gather_dim = _check(A_shard, Bs, gather_dim, group.size())
    layout = GatherLayout(A_shard.shape, gather_dim, group.size())
    m, n, k = layout.total_rows, sum(B.shape[1] for B in Bs), Bs[0].shape[0]
    shard = layout.flat_shard(A_shard)
    with Call(
        "all_gather_matmul",
        group,
        A_shard,
        m,
        n,
        k,
        layout.rows,
        lambda: f"({describe(A_shard, *Bs)}, {gather_dim=}, {return_A=})",
        shard,
    ) as call:
        products = [new_output(shard, m, B.shape[1]) for B in Bs]
        outputs = [layout.product(product) for product in products]
        gathered = layout.new_gathered(shard) if return_A or (call.sequential and not call.in_place) else None
        place = None if gathered is None else partial(layout.part, gathered)
        if gathered is not None and call.sequential:
            call.all_gather(shard, place, None, [gathered])
            for B, product in zip(Bs, products, strict=True):
                multiply(gathered, B, product)
        elif call.sequential and not layout.last:
            call.all_gather(shard, None, None, products, at_once=lambda all: multiply_shards(all, Bs, products))
        else:
            # Along the last dimension a product is a sum over ranks: as wide as in a reduction, and rounded once.
            sums = [accumulator(product) for product in products] if layout.last else products
            written = sums if gathered is None else [*sums, gathered]
            consume = _consumer(layout, call, Bs, sums)
            call.all_gather(shard, place, consume, written, accumulate=layout.last)
            for product, total in zip(products, sums, strict=True):
                if total is not product:
                    product.copy_(total)
        return (layout.gathered(gathered) if gathered is not None and return_A else None), outputs


def accumulator(tensor: Tensor) -> Tensor:
    """Where to add up what ends in ``tensor``: the tensor itself, or a float32 one if it has half precision."""
    return tensor.new_empty(tensor.shape, dtype=torch.float32) if tensor.dtype.itemsize == 2 else tensor


def _consumer(
    layout: GatherLayout, call: Call, Bs: Sequence[Tensor], sums: Sequence[Tensor]
) -> Callable[[Chunk, Tensor], None]:
    """What is done with each chunk of the gathered tensor, whose other chunks may still be on their way."""
    rows, columns = layout.rows, layout.columns
    cut = bounds(rows, call.choice.chunks)

    def fill_rows(chunk: Chunk, part: Tensor) -> None:
        rank, piece = chunk
        start = rank * rows + cut[piece]
        for B, product in zip(Bs, sums, strict=True):
            multiply(part, B, product[start : start + part.shape[0]])

    def add_up(chunk: Chunk, part: Tensor) -> None:
        rank, piece = chunk
        first = rank == call.rank
        for B, total in zip(Bs, sums, strict=True):
            weight, target = B[rank * columns : (rank + 1) * columns], total[cut[piece] : cut[piece + 1]]
            if target.dtype != part.dtype:
                target.copy_(part @ weight) if first else target.add_(part @ weight)
            else:
                multiply(part, weight, target, add=not first)

    return add_up if layout.last else fill_rows


def _fake(
    A_shard: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    world = resolve_group(group_name).size()
    gather_dim = _check(A_shard, Bs, gather_dim, world)
    products = [reference_product(A_shard, B.shape[1], gather_dim, world) for B in Bs]
    return (reference_gathered(A_shard, gather_dim, world) if return_A else None), products


def _setup_context(
    ctx: Any, inputs: Any, output: Any, *, keep_gathered: bool = True, keyword_only_inputs: Any = None
) -> None:
    ctx.set_materialize_grads(False)
    A_shard, Bs, ctx.gather_dim, ctx.group_name = inputs
    gathered = output[0] if keep_gathered else None
    ctx.kept_gathered = gathered is not None
    ctx.save_for_backward(A_shard if gathered is None else gathered, *Bs)


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
    return grad_shard, grad_Bs, None, None


_SIGNATURE = (
    "(Tensor A_shard, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True) -> (Tensor?, Tensor[])"
)
define(
    "fused_all_gather_matmul",
    _SIGNATURE,
    eager=_eager,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    multiplies=True,
)
define(
    "_fused_all_gather_matmul_save_shard",
    _SIGNATURE,
    eager=_eager,
    fake=_fake,
    setup_context=partial(_setup_context, keep_gathered=False),
    backward=_backward,
    multiplies=True,
)
