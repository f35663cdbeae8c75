"""Code that keeps tensors from call to call, outside of modules. While a model is traced, these have no values."""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import PipelineModel
from symm_overlap.pipeline.model._torch import FakeTensor
from tests.pipeline.model.models import WIDTH, reals
from tests.pipeline.model.reference import EXACT, same_gradients, whole_step
from tests.quick import one_in
from tests.ranks import Pool, Rank

Table = Callable[[int], Any]
OPTIONS = {"loss": lambda y, target: (y - target).square().mean()}
BATCH = {"x": reals(8, WIDTH), "target": reals(8, WIDTH, seed=1)}


def compute(width: int) -> Tensor:
    return torch.arange(width, dtype=torch.float64) / width


def bounded() -> Table:
    return functools.lru_cache(maxsize=4)(compute)


def unbounded() -> Table:
    return functools.cache(compute)


def of_nested_values() -> Table:
    kept = functools.cache(lambda width: ({"table": [compute(width)]}, 1))
    return lambda width: kept(width)[0]["table"][0]


def unless_compiling() -> Table:
    """As `compile_compatible_method_lru_cache` of transformers: the FLOPs of layers are counted without compiling."""
    kept = functools.lru_cache(compute)
    return lambda width: compute(width) if torch.compiler.is_compiling() else kept(width)


class Result:
    def __init__(self, table: Tensor) -> None:
        self.table = table


def of_an_object() -> Table:
    kept = functools.cache(lambda width: OrderedDict(result=Result(compute(width))))
    return lambda width: kept(width)["result"].table


def of_a_function() -> Table:
    @functools.cache
    def kept(width: int) -> Callable[[], Tensor]:
        table = compute(width)
        return lambda: table

    return lambda width: kept(width)()


def of_a_number() -> Table:
    """While a model is traced, ``item()`` returns a symbol."""
    kept = functools.cache(lambda width: compute(width).sum().item())
    return lambda width: compute(width) * kept(width)


def of_a_method() -> Table:
    class Tables:
        @functools.lru_cache  # noqa: B019
        def of(self, width: int) -> Tensor:
            return compute(width)

    return Tables().of


CACHES = [bounded, unbounded, of_nested_values, of_an_object, of_a_function, of_a_number, unless_compiling, of_a_method]


class Layer(nn.Module):
    def __init__(self, table: Table | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if self.table is None else x + self.table(WIDTH)).tanh()


class Model(nn.Module):
    """It adds a table to its input, or each layer does, or both."""

    def __init__(self, table: Table, around: bool, inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(table if inside else None) for _ in range(4))
        self.table = table if around else None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is not None:
            x = x * self.table(WIDTH)
        for layer in self.layers:
            x = layer(x)
        return x


PLACES = {"between layers": (True, False), "inside layers": (False, True), "both": (True, True)}


def made(me: Rank, table: Table, place: str, **options: Any) -> tuple[PipelineModel, nn.Module]:
    torch.manual_seed(0)
    model = Model(table, *PLACES[place]).double()
    whole = copy.deepcopy(model)
    return PipelineModel(model, num_microbatches=2, schedule="ZBV", group=me.group, **OPTIONS, **options), whole


def train(me: Rank, pipe: PipelineModel, whole: nn.Module) -> None:
    for count in (8, 6):  # a second trace
        batch = {name: tensor[:count] for name, tensor in BATCH.items()}
        loss, expected = pipe.run_train(**batch), whole_step(whole, batch, OPTIONS, 2)
        assert not isinstance(loss, FakeTensor)
        if loss is not None:
            torch.testing.assert_close(loss, expected, **EXACT)
        same_gradients(pipe, whole)


def trains_like_the_whole(me: Rank, make: Callable[[], Table], place: str, costs: str) -> None:
    table = make()
    train(me, *made(me, table, place, costs=costs))
    assert torch.equal(table(WIDTH), make()(WIDTH))


@pytest.mark.parametrize(("place", "make"), one_in(3, [(place, make) for make in CACHES for place in PLACES], first=2))
def test_a_function_that_keeps_its_results_returns_values_in_a_step(
    ranks: Pool, make: Callable[[], Table], place: str
) -> None:
    ranks.run(2, trains_like_the_whole, make, place, "flops")


def test_it_does_so_if_no_flops_are_counted(ranks: Pool) -> None:
    ranks.run(1, trains_like_the_whole, bounded, "both", "parameters")


def tuples_of_another_thread(me: Rank) -> None:
    """A tuple that is being filled must not get a second reference."""
    ended, errors, made_so_far = threading.Event(), [], 0

    def fill() -> None:
        nonlocal made_so_far
        while not ended.is_set():
            try:
                tuple(number for number in range(1000))
                made_so_far += 1
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(3):
            train(me, *made(me, bounded(), "both"))
    finally:
        ended.set()
        thread.join()
    assert made_so_far
    assert not errors


def test_other_threads_may_go_on_while_a_model_is_traced(ranks: Pool) -> None:
    ranks.run(1, tuples_of_another_thread)


def what_was_kept_with_values_stays(me: Rank) -> None:
    calls = []

    @functools.cache
    def other() -> Tensor:
        calls.append(1)
        return torch.ones(1)

    before = other()
    train(me, *made(me, bounded(), "both"))
    assert other() is before
    assert len(calls) == 1


def test_other_caches_are_left_alone(ranks: Pool) -> None:
    ranks.run(1, what_was_kept_with_values_stays)


def in_a_dict() -> Table:
    kept: dict[int, Tensor] = {}

    def table(width: int) -> Tensor:
        if width not in kept:
            kept[width] = compute(width)
        return kept[width]

    table.kept = kept  # type: ignore[attr-defined]
    return table


def is_refused(me: Rank, costs: str) -> None:
    table = in_a_dict()
    pipe, whole = made(me, table, "inside layers", costs=costs)
    with pytest.raises(RuntimeError, match="a layer uses a tensor without values, which its code has kept since"):
        pipe.run_train(**BATCH)
    (kept,) = table.kept.values()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="a layer uses a tensor without values"):
        kept + 1
    # The ways out that the message names, besides buffers:
    table = in_a_dict()
    pipe, whole = made(me, table, "inside layers", costs=costs)
    whole(BATCH["x"])
    train(me, pipe, whole)
    layers = [f"layers.{index}" for index in range(4)]
    options = {"trace": False, "layer_names": layers, "first": [], "last": []}
    train(me, *made(me, in_a_dict(), "inside layers", **options))


@pytest.mark.parametrize("costs", ["flops", "parameters"])
def test_what_other_code_has_kept_from_the_trace_is_refused_in_a_step(ranks: Pool, costs: str) -> None:
    ranks.run(1, is_refused, costs)


def with_frozen_objects(me: Rank) -> None:
    """The collector does not list frozen objects, so the cache is not found."""
    table = bounded()
    gc.freeze()
    try:
        pipe, _ = made(me, table, "inside layers")
        with pytest.raises(RuntimeError, match="a layer uses a tensor without values"):
            pipe.run_train(**BATCH)
    finally:
        gc.unfreeze()


def test_a_cache_that_is_not_found_is_refused_too(ranks: Pool) -> None:
    ranks.run(1, with_frozen_objects)
