"""Ranks that trace the same model in different orders compute what the model computes, or get an error that says why.

Python walks through a set of strings in an order that differs between processes. The ranks of the tests are forked from
one process, so here the rank decides the order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

import symm_overlap
from symm_overlap.pipeline.model.cut import cut
from symm_overlap.pipeline.model.stage_module import run_of
from tests.pipeline.model.in_one_process import Stages, traced
from tests.pipeline.model.ordered import (
    COMPUTE,
    FACTORS,
    RANDOM,
    Compute,
    Model,
    batch,
    begin_with,
    kinds,
    make,
    piped,
    trained,
)
from tests.quick import one_in
from tests.ranks import Pool, Rank


def trains(me: Rank, how: str, together: bool) -> None:
    begin_with(me.rank)
    trained(me, make(how, together))


@pytest.mark.parametrize("together", one_in(2, [False, True]))
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


class Found(dict):
    """A dict of a class of its own, such as the outputs of Hugging Face's models."""


torch.utils._pytree.register_pytree_node(
    Found,
    lambda found: (list(found.values()), list(found)),
    lambda values, keys: Found(zip(keys, values, strict=True)),
    serialized_type_name="tests.Found",
)


class InFound(nn.Module):
    def forward(self, x: Tensor) -> Found:
        return Found({kind: x.mean() + FACTORS[kind] for kind in kinds()})


class AddsUp(Model):
    """Uses what it computes in the order of `kinds` too, so that constants alone tell the uses apart."""

    def __init__(self, compute: Compute) -> None:
        super().__init__(compute)
        self.angles = InFound()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        found = self.compute(self, x)
        for layer in self.layers:
            x = layer(x, torch.ones(()).double())
        for kind in kinds():
            x = x + found[kind] * torch.tensor(FACTORS[kind])
        return x


def filled(model: Model, x: Tensor) -> dict[str, Tensor]:
    masks = {}
    for kind in kinds():
        masks[kind] = torch.zeros(8).double()
        masks[kind][: int(FACTORS[kind])] = 1.0
    return {kind: (x * masks[kind]).mean() for kind in kinds()}


ADDED: dict[str, Compute] = {
    "constants": COMPUTE["constants"],
    "filled": filled,
    "a class": COMPUTE["a dict of a module"],
}


def adds_up(me: Rank, how: str) -> None:
    begin_with(me.rank)
    torch.manual_seed(0)
    trained(me, AddsUp(ADDED[how]).double())


@pytest.mark.parametrize("how", ADDED)
def test_values_whose_uses_differ_in_constants_alone(ranks: Pool, how: str) -> None:
    ranks.run(2, adds_up, how)


def with_names_of_the_rank(me: Rank) -> None:
    """Groups and devices have other names on each rank, and the model computes the same."""
    own, _ = dist.new_subgroups_by_enumeration([[0], [1]])
    begin_with(0)
    reduced: Compute = lambda model, x: {  # noqa: E731
        kind: all_reduce(model.named(x, f"cpu:{me.rank}").detach() * FACTORS[kind], "sum", own) for kind in kinds()
    }
    torch.manual_seed(0)
    model = Model(reduced)
    model.named = Named()
    trained(me, model.double())


class Named(nn.Module):
    def forward(self, x: Tensor, device: str) -> Tensor:
        return x.mean().to(device.split(":")[0])


def test_names_of_groups_and_devices_may_differ(fresh_ranks: Callable[[int], Pool]) -> None:
    fresh_ranks(2).run(2, with_names_of_the_rank)


class Returns(Model):
    """Returns random values, which only their places in what it returns tell apart."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.compute(self, x.detach())
        for layer in self.layers:
            x = layer(x, torch.ones(()).double())
        return found | {"x": x}


def test_returned_values_are_told_apart_by_their_places() -> None:
    model, given = Returns(RANDOM).double(), {"x": batch()["x"]}
    stages = []
    for number in range(2):
        begin_with(number)
        stages.append(Stages(model, given, (2, 2), layer_names="layers.*"))
    begin_with(0)
    assert stages[0].parts[0].returned == stages[1].parts[0].returned
    passed = run_of(stages[0].parts[0], stages[0].modules[0])([], stages[0].tensors)
    found = [each.returned.filled(run_of(each.parts[1], each.modules[1])(passed, each.tensors)) for each in stages]
    for kind in FACTORS:
        torch.testing.assert_close(found[0][kind], found[1][kind], rtol=0, atol=0, msg=kind)


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
