"""A collective of torch may change the result of a compiled op in place: Inductor allows it if nobody else reads it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import symm_overlap
from tests.collective import reference as ref
from tests.ranks import Pool, Rank


def summed(X: Tensor, name: str) -> Tensor:
    total: Tensor = torch.ops._c10d_functional.all_reduce(X, "sum", name)
    return torch.ops._c10d_functional.wait_tensor(total)  # type: ignore[no-any-return]


def every_op(A: Tensor, B: Tensor, name: str) -> tuple[Tensor, ...]:
    ops = torch.ops.symm_overlap
    gathered, products = symm_overlap.all_gather_matmul(A, [B, A], 0, name)
    # Three results of two tensors.
    total, kept, kept_sum = ops.fused_matmuls_reduce_scatter_keep(
        [A], [B], None, "sum", 0, name, keep=[0], keep_sum=True
    )
    return (
        summed(symm_overlap.matmul_all_reduce(A, B, "sum", name), name),
        summed(symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, name), name),
        summed(symm_overlap.all_gather(A, 0, name), name),
        summed(symm_overlap.reduce_scatter(A, "sum", 0, name), name),
        summed(symm_overlap.all_reduce(A, "sum", name), name),
        summed(symm_overlap.all_gather_weight_matmul(A, B, 0, name, transpose=True), name),
        summed(ops.fused_matmuls_reduce_scatter([A, B], [B, A], None, "sum", 0, name), name),
        summed(ops.weight_grad_reduce_scatter(A, B, "sum", 0, name), name),
        *(summed(grad, name) for grad in ops.all_gather_weight_grad(A, [torch.cat([B, A])], 0, name)),
        *(summed(each, name) for each in (gathered, *products, total, *kept, kept_sum)),
    )


def sums_once_more(me: Rank) -> None:
    # The gathered weight has as many columns as A, whatever the dimension that is gathered.
    arguments = (*(ref.binary((4, 4), torch.float32, seed=seed) for seed in (me.rank, 9)), me.group_name)
    expected = every_op(*arguments)
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        found = torch.compile(every_op, fullgraph=True)(*arguments)
    for one, other in zip(found, expected, strict=True):
        ref.same(one, other)


def test_the_result_of_every_op_may_be_summed_in_place(ranks: Pool) -> None:
    ranks.run(2, sums_once_more, timeout=150)
