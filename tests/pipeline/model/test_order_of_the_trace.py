"""Ranks that trace the same model in different orders compute what the model computes, or get an error that says why.

Python walks through a set of strings in an order that differs between processes. The ranks of the tests are forked from
one process, so here the rank decides the order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import symm_overlap
from symm_overlap.pipeline.model import PipelineModel
from symm_overlap.pipeline.model.cut import cut
from tests.pipeline.model.in_one_process import traced
from tests.ranks import Pool, Rank

FACTORS = {"full": 1.0, "sliding": 2.0, "local": 5.0}
first = 0
"""With which kind this process begins."""


def kinds() -> Iterator[str]:
    names = [*FACTORS]
    return iter([*names[first:], *names[:first]])


class Angle(nn.Module):
    def forward(self, x: Tensor, kind: str) -> Tensor:
        return x.mean() + FACTORS[kind]


class Angles(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {kind: x.mean() + FACTORS[kind] for kind in kinds()}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, angle: Tensor | dict[str, Tensor]) -> Tensor:
        if isinstance(angle, dict):
            angle = angle["full"] - 2 * angle["sliding"] + 3 * angle["local"]
        return torch.tanh(self.linear(x)) * angle


Compute = Callable[["Model", Tensor], dict[str, Tensor]]


class Model(nn.Module):
    """Calls its layers in one order. What it gives to them is computed in the order of `kinds`."""

    def __init__(self, compute: Compute, *, together: bool = False) -> None:
        super().__init__()
        self.compute, self.together = compute, together
        self.embed = nn.Linear(8, 8)
        self.angle, self.angles, self.drop = Angle(), Angles(), nn.Dropout(0.5)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        for kind, factor in FACTORS.items():
            self.register_buffer(kind, torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        angles = self.compute(self, x)
        for number, layer in enumerate(self.layers):
            x = layer(x, angles if self.together else angles[[*FACTORS][number % 3]])
        return x


def without_gradients(model: Model, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {kind: model.angle(x, kind) * x.std() for kind in kinds()}


COMPUTE: dict[str, Compute] = {
    "modules": lambda model, x: {kind: model.angle(x, kind) for kind in kinds()},
    "operators": lambda model, x: {kind: x.mean() * FACTORS[kind] for kind in kinds()},
    "buffers": lambda model, x: {kind: x.mean() * getattr(model, kind) for kind in kinds()},
    "vmap": lambda model, x: {kind: torch.vmap(torch.mul, (0, None))(x, FACTORS[kind]).mean() for kind in kinds()},
    "constants": lambda model, x: {kind: x.mean() * torch.tensor(FACTORS[kind]) for kind in kinds()},
    "a dict of a module": lambda model, x: model.angles(x),
    "no_grad": without_gradients,
}
RANDOM: Compute = lambda model, x: {kind: model.drop(x) for kind in kinds()}  # noqa: E731


def batch(rows: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 8).double(), "target": torch.randn(rows, 8).double()}


def make(how: str | Compute, together: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(COMPUTE[how] if isinstance(how, str) else how, together=together).double()


def piped(me: Rank, model: nn.Module) -> PipelineModel:
    return PipelineModel(
        model, layer_names="layers.*", num_microbatches=2, loss=nn.functional.mse_loss, group=me.group, partition="even"
    )


def begin_with(number: int) -> None:
    global first
    first = number % 3


def trains(me: Rank, how: str, together: bool) -> None:
    begin_with(me.rank)
    model, given = make(how, together), batch()
    whole = copy.deepcopy(model)
    pipeline = piped(me, model)
    losses = [nn.functional.mse_loss(whole(x), y) for x, y in zip(*(t.chunk(2) for t in given.values()), strict=True)]
    torch.stack(losses).mean().backward()
    loss = pipeline.run_train(**given)
    if loss is not None:
        torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-12, atol=0)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-15, msg=name)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("how", COMPUTE)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_are_matched_by_how_they_are_computed(ranks: Pool, world: int, how: str, together: bool) -> None:
    ranks.run(world, trains, how, together)


def random_values(me: Rank) -> None:
    """Dropout is called in the order of the rank. What is done with each result tells them apart."""
    begin_with(me.rank)
    model = make(RANDOM)
    pipeline = piped(me, model)
    torch.manual_seed(0)
    loss = pipeline.run_train(**batch())
    if loss is not None:
        assert 0 < loss < 10


def test_random_values_are_told_apart_by_their_uses(ranks: Pool) -> None:
    ranks.run(2, random_values)


class Returns(Model):
    """Returns values that only their places in what it returns tell apart, since digests leave out constants."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.compute(self, x)
        for layer in self.layers:
            x = layer(x, torch.ones(()).double())
        return found | {"x": x}


def returns(me: Rank) -> None:
    begin_with(me.rank)
    x = batch()["x"]
    model = Returns(
        lambda model, x: {kind: x.relu() * model.embed(x) * torch.tensor(FACTORS[kind]) for kind in kinds()}
    )
    expected = copy.deepcopy(model.double())(x)
    found = piped(me, model).run_eval(x=x)
    if found is not None:
        for kind in FACTORS:
            torch.testing.assert_close(found[kind], expected[kind], msg=kind)


def test_returned_values_are_told_apart_by_their_places(ranks: Pool) -> None:
    ranks.run(2, returns)


def refused(me: Rank, model: nn.Module, message: str) -> None:
    pipeline = piped(me, model)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            pipeline.run_train(**batch())


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> None:
        self.total.add_(x.mean())


class Adds(Model):
    """Passes on values that nothing tells apart: the results of dropout, and what is computed with each."""

    def __init__(self) -> None:
        super().__init__(RANDOM)
        self.add = Total()

    def forward(self, x: Tensor) -> Tensor:
        dropped = self.compute(self, x.detach())
        squares = {kind: dropped[kind].square() for kind in FACTORS}
        for layer in self.layers:
            x = layer(x, torch.ones(()).double())
        for kind in FACTORS:
            self.add(dropped[kind] * squares[kind])
        return x


TRACED_OTHERWISE = (
    r"(?s)ranks 0 and 1 .* values that pass between stages .* start all ranks with the same PYTHONHASHSEED$"
)


def cannot_be_told_apart(me: Rank) -> None:
    begin_with(0)
    given = batch()
    for _ in range(2):
        piped(me, Adds().double()).run_train(**given)
    begin_with(me.rank)
    refused(me, Adds().double(), TRACED_OTHERWISE)


def test_values_that_cannot_be_told_apart_need_the_same_order_on_all_ranks(ranks: Pool) -> None:
    ranks.run(2, cannot_be_told_apart)


def computes_something_else(me: Rank) -> None:
    begin_with(0)
    other: Compute = lambda model, x: {kind: x.mean() * (FACTORS[kind] + me.rank) for kind in kinds()}  # noqa: E731
    refused(me, make(other), TRACED_OTHERWISE)


def test_ranks_whose_models_compute_something_else_are_told(ranks: Pool) -> None:
    ranks.run(2, computes_something_else)


class Shuffled(Model):
    def forward(self, x: Tensor) -> Tensor:
        for kind in kinds():
            x = self.layers[[*FACTORS].index(kind)](x, torch.ones(()).double())
        return x


def calls_layers_in_another_order(me: Rank) -> None:
    begin_with(me.rank)
    model = Shuffled(RANDOM).double()
    refused(me, model, r"(?s)order in which the model calls its layers: layers\.0, layers\.1, .* PYTHONHASHSEED$")


def test_ranks_that_call_layers_in_another_order_are_told(ranks: Pool) -> None:
    ranks.run(2, calls_layers_in_another_order)


def later(me: Rank, lane: int) -> None:
    """The ranks differ from the second shape on."""

    def compute(model: Model, x: Tensor) -> dict[str, Tensor]:
        return {kind: x.mean() * (FACTORS[kind] + (len(x) > 4) * me.rank) for kind in kinds()}

    with symm_overlap.lane(lane):
        begin_with(0)
        pipeline = piped(me, make(compute))
        pipeline.run_train(**batch())
        with pytest.raises(ValueError, match=r"(?s)differ in their batch .* values between stages with the digests"):
            pipeline.run_train(**batch(12))


def test_later_batches_are_compared_too(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, later, fresh_lane())


@pytest.mark.parametrize("how", [*COMPUTE, RANDOM], ids=[*COMPUTE, "random"])
def test_digests_do_not_depend_on_the_order(how: str | Compute) -> None:
    found = []
    for number in range(3):
        begin_with(number)
        graph, _, _ = traced(make(how), {"x": batch()["x"]}, layer_names="layers.*")
        found.append([part.returned for part in cut(graph, (1, 2, 1))][:-1])
    begin_with(0)
    assert found[0] == found[1] == found[2]
    assert len({*found[0]}) == 2
