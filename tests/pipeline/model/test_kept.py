"""What a model keeps from one batch for the next, in attributes that are None at first, is missing in its stages."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import TraceError
from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import WIDTH, reals


class Keeping(nn.Module):
    """A model with something between its layers."""

    def __init__(self, between: Callable[[Keeping, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.between = between
        self.kept: Tensor | None = None
        self.count: int | None = None
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[1](self.between(self, x, self.layers[0](x)))
        return y


def the_last_result(model: Keeping, x: Tensor, y: Tensor) -> Tensor:
    z = y if model.kept is None else y + model.kept
    model.kept = z.detach()
    return z


def the_last_input(model: Keeping, x: Tensor, y: Tensor) -> Tensor:
    z = y if model.kept is None else y + model.kept
    model.kept = x
    return z


def rows_of_a_table(model: Keeping, x: Tensor, y: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.zeros(4, WIDTH, dtype=x.dtype)
    z = y + model.kept[:2]
    model.kept.view(2, 2, WIDTH)[0].copy_(x)
    return z


def a_table_that_grows(model: Keeping, x: Tensor, y: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.arange(WIDTH, dtype=x.dtype)
    z = y * model.kept
    model.kept.view(-1).add_(1)
    return z


def a_number(model: Keeping, x: Tensor, y: Tensor) -> Tensor:
    model.count = (model.count or 0) + 1
    return y * model.count


def whether_it_is_the_first(model: Keeping, x: Tensor, y: Tensor) -> Tensor:
    first, model.count = model.count is None, 1
    return model.layers[0](y) if first else y


def rows_that_pile_up(model: Keeping, x: Tensor, y: Tensor) -> Tensor:
    model.kept = y if model.kept is None else torch.cat([model.kept, y])
    return y * model.kept.sum(1).view(len(x), 1)


def a_result_that_nothing_reads(model: Keeping, x: Tensor, y: Tensor) -> Tensor:
    model.kept, model.count = y, len(y)
    return y


def what_depends_on_no_batch(model: Keeping, x: Tensor, y: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.arange(WIDTH, dtype=x.dtype)
        model.kept.mul_(2)
    return y * model.kept


def a_mean_in_a_buffer(model: Keeping, x: Tensor, y: Tensor) -> Tensor:
    model.count = len(x)
    model.mean.mul_(0.9).add_(x.mean(0))
    return y + model.mean


@pytest.mark.parametrize(
    "between",
    [the_last_result, the_last_input, rows_of_a_table, a_table_that_grows, a_number, whether_it_is_the_first],
)
def test_what_is_kept_for_the_next_batch_is_refused(between: Callable[[Keeping, Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match=r"does something else with a second batch .* it fills (kept|count), which"):
        Stages(Keeping(between).double(), {"x": reals(2, WIDTH)}, (1, 1))


def test_a_second_batch_that_fails_is_told_with_what_is_kept() -> None:
    with pytest.raises(TraceError, match="cannot compute a second batch after the first: it fills kept") as error:
        Stages(Keeping(rows_that_pile_up).double(), {"x": reals(2, WIDTH)}, (1, 1))
    assert "kept.sum(1).view" in str(error.value.__cause__)


@pytest.mark.parametrize("between", [a_result_that_nothing_reads, what_depends_on_no_batch, a_mean_in_a_buffer])
def test_what_makes_no_difference_may_be_kept(between: Callable[[Keeping, Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, batch = Keeping(between).double(), {"x": reals(2, WIDTH)}
    whole = copy.deepcopy(model)
    stages = Stages(model, batch, (1, 1))
    for _ in range(2):
        torch.testing.assert_close(stages(), whole(**batch), rtol=0, atol=0)
