"""The backward pass keeps only the tensors from which a required gradient is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import symm_overlap
from tests.ranks import Pool, Rank

Call = Callable[[Rank, Tensor, Tensor], Any]

LEFT, RIGHT, GATHERED = (8, 4), (4, 6), (16, 4)


def gather(me: Rank, a: Tensor, b: Tensor) -> Tensor:
    return symm_overlap.all_gather_matmul(a, [b], 0, me.group)[1][0]


def gather_without(me: Rank, a: Tensor, b: Tensor) -> Tensor:
    return symm_overlap.all_gather_matmul(a, [b], 0, me.group, return_A=False)[1][0]


def scatter(me: Rank, a: Tensor, b: Tensor) -> Tensor:
    return symm_overlap.matmul_reduce_scatter(a, b, "sum", 0, me.group)


def reduce(me: Rank, a: Tensor, b: Tensor) -> Tensor:
    return symm_overlap.matmul_all_reduce(a, b, "sum", me.group)


def gather_weight(me: Rank, a: Tensor, b: Tensor) -> Tensor:
    return symm_overlap.all_gather_weight_matmul(a, b[: 4 // me.world], 0, me.group)


FOR_RIGHT: dict[Call, Sequence[int]] = {
    gather: GATHERED,
    gather_without: LEFT,
    scatter: LEFT,
    reduce: LEFT,
    gather_weight: LEFT,
}
"""The shape of the tensor from which the gradient of the right-hand side is computed."""


def kept(me: Rank, call: Call, left: bool, right: bool) -> list[tuple[int, ...]]:
    a, b = torch.ones(LEFT, requires_grad=left), torch.ones(RIGHT, requires_grad=right)
    found: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(me, a, b)
    y.sum().backward()
    assert (a.grad is not None, b.grad is not None) == (left, right)
    return found


@pytest.mark.parametrize("call", FOR_RIGHT, ids=lambda call: call.__name__)
@pytest.mark.parametrize(("left", "right"), [(True, False), (False, True), (True, True)])
def test_only_what_a_gradient_needs_is_kept(ranks: Pool, call: Call, left: bool, right: bool) -> None:
    weight = (2, 6) if call is gather_weight else RIGHT
    expected = [*([FOR_RIGHT[call]] if right else []), *([weight] if left else [])]
    for found in ranks.run(2, kept, call, left, right):
        assert found == expected


def writes_to_the_gathered(me: Rank) -> None:
    a, b = torch.ones(LEFT, requires_grad=True), torch.ones(RIGHT)
    gathered, (y,) = symm_overlap.all_gather_matmul(a, [b], 0, me.group)
    assert gathered is not None
    gathered.add_(1)
    (y.sum() + gathered.sum()).backward()
    torch.testing.assert_close(a.grad, torch.full(LEFT, 2.0 * (6 + 1)))


def test_the_gathered_tensor_may_be_written_to_where_the_weight_has_no_gradient(ranks: Pool) -> None:
    ranks.run(2, writes_to_the_gathered)
