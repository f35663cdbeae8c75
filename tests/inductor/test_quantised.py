"""If a gathered tensor is quantised, it is sent as float8, and every bit of the result stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

import symm_overlap
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from tests.inductor.scaled_cases import SCALES_OF_ROWS
from tests.inductor.tracing import compiled_up_to_the_pass
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import comparing


class Float8Linear(nn.Module):
    """A linear layer that quantises its input. Its weight is already quantised. Its input is this rank's rows."""

    def __init__(self, group: Any, by_row: bool) -> None:
        super().__init__()
        self.group, self.by_row = group, by_row
        self.weight, self.scale = self.quantised(torch.randn(32, 16))

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        largest = x.abs().amax(-1, keepdim=True) if self.by_row else x.abs().max()
        scale = torch.clamp(largest.float(), min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.quantised(all_gather_tensor(torch.nn.functional.layer_norm(x, (16,)), 0, self.group))
        y = torch._scaled_mm(x, self.weight.t(), scale, self.scale.t(), out_dtype=torch.bfloat16)
        return reduce_scatter_tensor(y.relu(), "sum", 0, self.group)


def layer(me: Rank, by_row: bool, broken: float) -> None:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    torch.manual_seed(me.rank)
    module, x = Float8Linear(me.group, by_row), torch.randn(6, 16, dtype=torch.bfloat16)
    if me.rank == 1:
        x[3, 5] = broken
    with torch.no_grad(), comparing(False):
        found = compiled_up_to_the_pass(module, OverlapPass(Choices()))(x)
        expected = module(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    (report,) = symm_overlap.inductor.report().graphs
    numbers, scales = 6 * 16, 6 if by_row else 1  # in float8; and the maximum of each row or of all, in bfloat16
    moved = (me.world - 1) * (numbers + 2 * scales)
    assert [(site.matmuls, site.moved) for site in report.sites if site.fused] == [(1, moved)], "float8"


@pytest.mark.parametrize("broken", one_in(2, [float("nan"), 0.0, float("inf")]))
@pytest.mark.parametrize(
    "by_row",
    [False, pytest.param(True, marks=[pytest.mark.skipif(not SCALES_OF_ROWS, reason="torch 2.11"), pytest.mark.slow])],
)
def test_a_layer_that_quantises_its_input(ranks: Pool, by_row: bool, broken: float) -> None:
    ranks.run(2, layer, by_row, broken, timeout=120)


def any_length(me: Rank, by_row: bool) -> None:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    torch.manual_seed(me.rank)
    module = Float8Linear(me.group, by_row)
    compiled = compiled_up_to_the_pass(module, OverlapPass(Choices()), dynamic=True)
    for length in (6, 4, 10):
        x = torch.randn(length, 16, dtype=torch.bfloat16)
        with torch.no_grad(), comparing(False):
            assert torch.equal(compiled(x), module(x))
    (report,) = symm_overlap.inductor.report().graphs
    assert [site.moved for site in report.sites if site.fused] == [None], "one graph for all lengths"


@pytest.mark.parametrize("by_row", [False, True] if SCALES_OF_ROWS else [False])
def test_sizes_may_be_symbolic(ranks: Pool, by_row: bool) -> None:
    ranks.run(2, any_length, by_row, timeout=120)
