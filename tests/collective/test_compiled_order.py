"""Compiled programs make their calls in the same order on all ranks, whatever else each rank computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import symm_overlap
from tests.ranks import Pool, Rank

ROWS = ((8, 8, 1, 8), (1, 64, 1, 8))
"""The rows of the tensors, by rank."""


def in_one_order(me: Rank) -> None:
    """Tensor sizes, by which Inductor decides what to compute first, differ between the ranks.

    No two calls have the same shape, so ranks that made them in different orders would raise an error.
    """
    torch._dynamo.reset()
    mine = [torch.ones(rows, 1024, dtype=torch.float64) for rows in ROWS[me.rank]]
    weights = [torch.ones(16, 8 * (number + 1), dtype=torch.float64) for number in range(len(mine))]

    def program(mine: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        inputs = [one.sin().view(-1, 64, 16).sum(0) for one in mine]
        sums = [
            symm_overlap.matmul_all_reduce(x.cos(), w, "sum", me.group) for x, w in zip(inputs, weights, strict=True)
        ]
        own = [one.view(-1, 64).cos() @ total for one, total in zip(mine, sums, strict=True)]
        return [one.sum(0) + total.sum() for one, total in zip(own[::-1], sums, strict=True)]

    expected = program(mine, weights)
    caches = inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False)
    with caches[0], caches[1]:
        found = torch.compile(program, fullgraph=True, dynamic=False)(mine, weights)
    torch.testing.assert_close(found, expected)


def test_ranks_with_other_sizes_make_the_same_calls(ranks: Pool) -> None:
    ranks.run(2, in_one_order, timeout=120)
