"""Compiled programs make their calls in the same order on all ranks, whatever else each rank computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import comm_analysis
from torch._inductor import config as inductor_config
from torch._inductor.utils import is_collective

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
        gathered = symm_overlap.all_gather_matmul(inputs[0], [weights[0]], 0, me.group, return_A=False)[1][0]
        own = [one.view(-1, 64).cos() @ total for one, total in zip(mine, sums, strict=True)]
        return [gathered.sum(), *(one.sum(0) + total.sum() for one, total in zip(own[::-1], sums, strict=True))]

    expected = program(mine, weights)
    sizes: list[int] = []

    def noted(nodes: list[Any]) -> list[Any]:
        """Ask for what Inductor wants to know on a GPU, to estimate how long a collective takes."""
        sizes.extend(comm_analysis.get_collective_group_size(each.node) for each in nodes if is_collective(each.node))
        return nodes

    caches = inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False)
    with caches[0], caches[1], inductor_config.patch(_pre_fusion_custom_pass=noted):
        found = torch.compile(program, fullgraph=True, dynamic=False)(mine, weights)
    torch.testing.assert_close(found, expected)
    assert sizes == [me.world] * 5


@pytest.mark.slow
def test_ranks_with_other_sizes_make_the_same_calls(ranks: Pool) -> None:
    ranks.run(2, in_one_order, timeout=120)
