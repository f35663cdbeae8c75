"""A tensor of one element is contiguous whatever its strides are. Every path accepts it, and the lane stays usable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import symm_overlap
from tests.ranks import Pool, Rank

PATHS = ["sequential", "pipelined", "c10d"]


def one_element(stride: int) -> torch.Tensor:
    return torch.full((8,), 3.0).as_strided((1, 1), (stride, stride))


def calls(me: Rank, path: str, lane: int) -> None:
    w = me.world
    with symm_overlap.lane(lane), symm_overlap.force_path(path):
        x = torch.ones(w, requires_grad=True)
        symm_overlap.reduce_scatter(x, "sum", 0, me.group).sum().backward()  # its gradient is expanded: stride 0
        assert torch.equal(x.grad, torch.ones(w))
        A, B = torch.ones(w, 4, requires_grad=True), torch.ones(4, 1, requires_grad=True)
        product = symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group)
        assert product.item() == 4 * w
        product.sum().backward()
        assert torch.equal(A.grad, torch.ones(w, 4))
        assert torch.equal(B.grad, torch.full((4, 1), float(w)))
        for stride in (0, 1, 7):
            one = one_element(stride)
            assert one.stride() == (stride, stride)
            assert torch.equal(symm_overlap.all_gather(one, 0, me.group), torch.full((w, 1), 3.0))
            assert torch.equal(symm_overlap.all_reduce(one, "sum", me.group), torch.full((1, 1), 3.0 * w))
            column = one.expand(w, 1)  # stride 0
            kept = torch.ops.symm_overlap.fused_matmuls_reduce_scatter_keep(
                [column], [one], one.expand(w, 1), "sum", 0, me.group_name, keep=[0], keep_sum=True
            )
            assert torch.equal(kept[0], torch.full((1, 1), 12.0 * w))
            assert torch.equal(kept[1][0], torch.full((w, 1), 9.0))
            assert torch.equal(kept[2], torch.full((w, 1), 12.0))
            gathered, (y,) = symm_overlap.all_gather_matmul(one, [one], 0, me.group)
            assert torch.equal(gathered, torch.full((w, 1), 3.0))
            assert torch.equal(y, torch.full((w, 1), 9.0))
            assert torch.equal(symm_overlap.matmul_all_reduce(one, one, "avg", me.group), torch.full((1, 1), 9.0))
            weights = torch.ops.symm_overlap.fused_all_gather_weight_matmul
            assert torch.equal(weights(one, one, 0, True, me.group_name), torch.full((1, w), 9.0))
            assert torch.equal(weights(one.expand(1, w), one, 1, True, me.group_name), torch.full((1, 1), 9.0 * w))
            grad = torch.ops.symm_overlap.weight_grad_reduce_scatter(one, one.expand(1, w), "sum", 1, me.group_name)
            assert torch.equal(grad, torch.full((1, 1), 9.0 * w))
        rows = torch.arange(2.0 * w).view(w, 2)
        assert torch.equal(symm_overlap.all_gather(rows[me.rank :][:1], 0, me.group), rows)  # the lane is in step


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world", [2, 3])
def test_one_element_of_any_stride_travels_on_every_path(
    ranks: Pool, fresh_lane: Callable[[], int], world: int, path: str
) -> None:
    ranks.run(world, calls, path, fresh_lane())
