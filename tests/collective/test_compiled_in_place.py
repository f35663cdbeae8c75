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


def every_op_that_returns_a_tensor(A: Tensor, B: Tensor, name: str) -> tuple[Tensor, ...]:
    return (
        summed(symm_overlap.matmul_all_reduce(A, B, "sum", name), name),
        summed(symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, name), name),
        summed(symm_overlap.all_gather(A, 0, name), name),
        summed(symm_overlap.reduce_scatter(A, "sum", 0, name), name),
        summed(symm_overlap.all_reduce(A, "sum", name), name),
        summed(symm_overlap.all_gather_weight_matmul(A, B, 0, name, transpose=True), name),
    )


def sums_once_more(me: Rank) -> None:
    # The gathered weight has as many columns as A, whatever the dimension that is gathered.
    arguments = (*(ref.binary((4, 4), torch.float32, seed=seed) for seed in (me.rank, 9)), me.group_name)
    expected = every_op_that_returns_a_tensor(*arguments)
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        found = torch.compile(every_op_that_returns_a_tensor, fullgraph=True)(*arguments)
    for one, other in zip(found, expected, strict=True):
        ref.same(one, other)


def test_the_result_of_every_op_may_be_summed_in_place(ranks: Pool) -> None:
    ranks.run(2, sums_once_more, timeout=150)
