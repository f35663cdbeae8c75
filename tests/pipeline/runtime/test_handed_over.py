"""What a stage passes on arrives as it was returned, also on the same rank, where nothing is sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline import read_csv, verify
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from tests.pipeline.runtime.models import ROWS, WIDTH, Layer, assert_gradients, batch, gradients, reference, squared
from tests.pipeline.runtime.test_contract import runtime_of
from tests.ranks import Pool, Rank


class Counts(nn.Module):
    """Passes on a running mean, which is a buffer that every microbatch changes in place, or a view of it."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.layer, self.view = Layer(0), view
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        self.mean.mul_(0.5).add_(y.detach().mean(0))
        return y, self.mean[None] if self.view else self.mean


class Subtracts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(1)

    def forward(self, x: Tensor, mean: Tensor) -> Tensor:
        y: Tensor = self.layer(x - mean)
        return y


class Doubles(nn.Module):
    """Passes on one value twice: as one tensor, as a tensor and a view of it, or as two tensors."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = Layer(0), how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, {"same": y, "view": y.view(-1, WIDTH), "copy": y.clone()}[self.how]


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(1)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x.mul_(3)
        y: Tensor = self.layer(x) + residual
        return y


def trains_as(me: Rank, whole: list[nn.Module], mine: list[nn.Module], backward: bool) -> None:
    """Compare with ``whole``, which runs one microbatch after the other, in a schedule that runs a stage for all."""
    for modules in (whole, mine):
        modules += [Layer(stage) for stage in range(2, 2 * me.world)]
    runtime = runtime_of(me, "LoopedBFS", 4, list(mine), loss=squared)
    for step in range(2):
        x, target = batch(4, step)
        losses: list[Tensor] = []
        _, expected, wanted = reference(whole, x, target, 4)
        (runtime.step if backward else runtime.eval)(x, target=target, losses=losses)
        if losses:
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        for stage in range(me.rank, 2 * me.world, me.world) if backward else ():
            assert_gradients(gradients(mine[stage]), wanted[stage])


def changed_by_the_next_microbatch(me: Rank, view: bool, backward: bool) -> None:
    trains_as(me, [Counts(view), Subtracts()], [Counts(view), Subtracts()], backward)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_buffer_arrives_as_it_was_after_its_microbatch(ranks: Pool, world: int, view: bool, backward: bool) -> None:
    ranks.run(world, changed_by_the_next_microbatch, view, backward)


def written_to_by_the_next_stage(me: Rank, how: str) -> None:
    trains_as(me, [Doubles("copy"), Writes()], [Doubles(how), Writes()], True)


@pytest.mark.parametrize("how", ["same", "view"])
@pytest.mark.parametrize("world", [1, 2])
def test_values_that_share_memory_arrive_apart(ranks: Pool, world: int, how: str) -> None:
    ranks.run(world, written_to_by_the_next_stage, how)


class AddsItself(nn.Module):
    """Adds a parameter of the input's shape, so that autograd gives both one gradient, in two views."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(ROWS, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x[None] + self.position[None])[0]


def gradients_before_they_are_used(me: Rank, backwards: str) -> None:
    whole, mine = [Layer(0), AddsItself()], [Layer(0), AddsItself()]
    schedule = read_csv(f"0F0,0F1,1F0,1F1,{backwards}\n")
    assert verify(schedule).ok
    runtime = PipelineRuntime(
        [Stage(module, index) for index, module in enumerate(mine)], schedule, group=me.group, loss=squared
    )
    x, target = batch(2)
    _, _, wanted = reference(whole, x, target, 2)
    runtime.step(x, target=target)
    for module, expected in zip(mine, wanted, strict=True):
        assert_gradients(gradients(module), expected)


@pytest.mark.parametrize("backwards", ["1B0,1B1,0B0,0B1", "1I0,1W0,1I1,1W1,0I0,0I1,0W0,0W1"])
def test_the_gradient_of_a_value_is_not_that_of_a_parameter(ranks: Pool, backwards: str) -> None:
    """The next microbatch adds to the gradient of the parameter before the previous stage uses that of the value."""
    ranks.run(1, gradients_before_they_are_used, backwards)
