"""Modules of the whole model decide in which mode the stages are, but they do not keep its parameters in memory."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import PipelineModel
from tests.pipeline.model.models import WIDTH, mean_square, reals
from tests.pipeline.model.reference import EXACT, same_gradients, whole_step
from tests.ranks import Pool, Rank

WITHOUT_TRACING = {"trace": False, "layer_names": "layers.*", "first": ("norm", "embed"), "last": "head"}


class Frozen(nn.Module):
    """A model that keeps its batch norm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.embed, self.head = nn.BatchNorm1d(4), nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.norm(x))
        for layer in self.layers:
            x = torch.tanh(layer(x)) if self.training else layer(x)
        return self.head(x)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def init(self, module: nn.Module) -> None:
        """Initialise nothing: the model is not on the meta device."""


def made(me: Rank, traced: bool, model: Frozen, **more: Any) -> tuple[PipelineModel, dict[str, Any]]:
    options = {"loss": mean_square, "group": me.group, **({} if traced else WITHOUT_TRACING), **more}
    batch = {"x": reals(8, 4), "target": reals(8, 3, seed=1)}
    return PipelineModel(model, num_microbatches=2, **options), batch


def trained(me: Rank, traced: bool, late: bool) -> None:
    torch.manual_seed(0)
    whole = Frozen().double()
    pipe, batch = made(me, traced, copy.deepcopy(whole))
    if late:
        pipe.build(**batch)
    pipe.train()
    if not traced:  # then the code around the layers is not run
        whole.forward = lambda x: nn.Sequential(whole.norm, whole.embed, *whole.layers, whole.head)(x)  # type: ignore
    whole.train()
    loss, expected = pipe.run_train(**batch), whole_step(whole, batch, {"loss": mean_square}, 2)
    if loss is not None:
        torch.testing.assert_close(loss, expected, **EXACT)
    same_gradients(pipe, whole)
    buffers = dict(whole.named_buffers())
    for stage in pipe.stages:
        assert all(torch.equal(value, buffers[name]) for name, value in stage.module.named_buffers())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_a_train_of_the_models_own_sets_the_modes_of_the_stages(ranks: Pool, traced: bool, late: bool) -> None:
    ranks.run(2, trained, traced, late)


def kept(me: Rank, traced: bool) -> list[str]:
    model = Frozen().double()
    alive = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    pipe, batch = made(me, traced, model, init=model.init)
    pipe.run_train(**batch)
    del model
    gc.collect()
    mine = dict(pipe.named_parameters())
    return [name for name, parameter in alive.items() if parameter() is not None and name not in mine]


@pytest.mark.parametrize("traced", [False, True])
def test_a_rank_keeps_no_parameters_of_other_stages(ranks: Pool, traced: bool) -> None:
    assert ranks.run(2, kept, traced) == [[], []]


def locked(me: Rank) -> None:
    model = Frozen().double()
    model.lock = threading.Lock()
    pipe, batch = made(me, False, model)
    pipe.run_train(**batch)


def test_without_tracing_a_model_may_contain_what_cannot_be_copied(ranks: Pool) -> None:
    ranks.run(2, locked)


class Remembering(nn.Module):
    """A model that has kept what its layers returned, in a list and a dict, while it was run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.remember, self.seen, self.last = True, [], {"seen": ()}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.remember:
                self.seen.append(x)
                self.last["seen"] = (x, layer)
        return x


def train_what_has_run(me: Rank) -> None:
    torch.manual_seed(0)
    model, batch = Remembering().double(), {"x": reals(8, WIDTH)}
    expected = model(**batch).mean()
    model.remember = False
    pipe = PipelineModel(model, num_microbatches=2, loss=lambda y: y.mean(), target=None, group=me.group)
    loss = pipe.run_train(**batch)
    if loss is not None:
        torch.testing.assert_close(loss, expected.detach(), **EXACT)
    assert len(model.seen) == 4
    assert model.seen[0].grad_fn is not None


def test_a_model_that_keeps_results_of_an_earlier_run_is_traced(ranks: Pool) -> None:
    ranks.run(2, train_what_has_run)


class Jitter(nn.Module):
    """As the rotary positions of DINOv3: its table is scaled at random, but only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(WIDTH, dtype=torch.float64) / WIDTH)

    def forward(self) -> tuple[Tensor, Tensor]:
        scale = torch.rand(()) + 1 if self.training else 1.0
        return self.table * scale, self.table + scale


class Moved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.jitter = Jitter()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.jitter()
        for layer in self.layers:
            x = torch.tanh(layer(x * scale)) + shift
        return x


def evaluate_and_train(me: Rank, training: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    model = Moved().double()
    whole = copy.deepcopy(model).eval()
    batch = {"x": reals(8, WIDTH)}
    pipe = PipelineModel(model, num_microbatches=2, loss=lambda y: y.mean(), target=None, group=me.group)
    for train in training:
        pipe.train(train)
        if train:
            pipe.run_train(**batch)
            continue
        found = pipe.run_eval(**batch)
        if found is not None:
            torch.testing.assert_close(found, whole(**batch), **EXACT)


@pytest.mark.parametrize("training", [(True, False), (False, True, False)])
def test_a_module_with_buffers_may_draw_numbers_in_training_only(ranks: Pool, training: tuple[bool, ...]) -> None:
    ranks.run(2, evaluate_and_train, training)


class Untrainable(Jitter):
    def forward(self) -> tuple[Tensor, Tensor]:
        if self.training:
            raise NotImplementedError("this module is for evaluation")
        return super().forward()


def evaluate_alone(me: Rank) -> None:
    torch.manual_seed(0)
    model, batch = Moved().double(), {"x": reals(8, WIDTH)}
    model.jitter = Untrainable()
    expected = model.eval()(**batch)
    pipe = PipelineModel(model, num_microbatches=2, loss=lambda y: y.mean(), target=None, group=me.group)
    found = pipe.eval().run_eval(**batch)
    if found is not None:
        torch.testing.assert_close(found, expected, **EXACT)


def test_a_module_with_buffers_may_be_for_evaluation_alone(ranks: Pool) -> None:
    ranks.run(2, evaluate_alone)
