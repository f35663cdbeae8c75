"""Python code between layers decides as in the whole model, or is refused if a trace would fix its decision."""

# ruff: noqa: NPY002  models may still use NumPy's global generator

from __future__ import annotations

import copy
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from symm_overlap.pipeline.model import PipelineModel, TraceError
from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import WIDTH, mean_square, reals
from tests.pipeline.model.reference import EXACT, whole_step
from tests.ranks import Pool, Rank


class Deciding(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Drawing(how) for _ in range(4))
        self.how = how

    def forward(self, x: Tensor, rows: slice = slice(None)) -> Tensor:
        if self.how == "strides" and x.is_contiguous():
            x = x * 2
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.how == "checkpoint" else layer(x)
            if {"gradients": torch.is_grad_enabled, "random": lambda: random.random() < 0.5}.get(self.how, bool)():
                x = x * 2
            elif self.how == "numpy":
                x = x * numpy.random.rand()
        return x[:, rows]


class Drawing(nn.Module):
    """A layer that counts its forwards, and may draw random numbers, as it runs whenever its stage does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.calls, self.drawn = nn.Linear(WIDTH, WIDTH), how, 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.how == "random in a layer":
            self.drawn = random.random() + float(numpy.random.rand())
        y: Tensor = torch.tanh(self.linear(x))
        return y


def of_two(me: Rank, how: str) -> tuple[PipelineModel, nn.Module]:
    torch.manual_seed(0)
    model = Deciding(how).double()
    whole = copy.deepcopy(model)
    options = {"num_microbatches": 2, "loss": mean_square, "partition": "even", "group": me.group}
    return PipelineModel(model, **options), whole


def like_the_whole(me: Rank, how: str) -> None:
    pipe, whole = of_two(me, how)
    target = reals(4, WIDTH, seed=1)
    given = reals(4, WIDTH)
    for x in (given, given.t().contiguous().t()) if how == "strides" else (given,):
        batch = {"x": x, "target": target}
        loss = pipe.run_train(**batch)
        expected = whole_step(whole, batch, {"loss": mean_square}, 2)
        found, mean = pipe.run_eval(x=x), pipe.run_eval(**batch)
        if loss is not None:
            torch.testing.assert_close(loss, expected, **EXACT)
            with torch.no_grad():
                torch.testing.assert_close(found, whole(x), **EXACT)
                torch.testing.assert_close(mean, mean_square(whole(x), target), **EXACT)
        if how == "slice":
            pipe.run_eval(x=x, rows=slice(0, 2))
            found = pipe.run_eval(x=x, rows=slice(1, 2))
            assert found is None or found.shape == (4, 1)


@pytest.mark.parametrize("how", ["gradients", "strides", "slice"])
def test_it_decides_as_in_the_whole_model(ranks: Pool, how: str) -> None:
    ranks.run(2, like_the_whole, how)


@pytest.mark.parametrize(("how", "what"), [("random", "Python's random"), ("numpy", r"numpy\.random")])
def test_random_numbers_are_refused(how: str, what: str) -> None:
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(TraceError, match=f"draws random numbers from {what} between its layers"):
        Stages(Deciding(how).double(), {"x": reals(2, WIDTH)}, (2, 2))
    assert before == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_other_threads_may_draw_random_numbers() -> None:
    """They do so while the model is cut, as threads that load data do."""
    stop = threading.Event()

    def draw() -> None:
        while not stop.wait(0.001):
            random.random()
            numpy.random.rand()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(draw)
        try:
            Stages(Deciding("").double(), {"x": reals(2, WIDTH)}, (2, 2))()
        finally:
            stop.set()


def test_layers_may_draw_random_numbers() -> None:
    """Cutting the model draws none of them."""
    model = Deciding("random in a layer").double()
    random.seed(1)
    numpy.random.seed(1)
    Stages(model, {"x": reals(2, WIDTH)}, (2, 2))()
    found = [layer.drawn for layer in model.layers]
    random.seed(1)
    numpy.random.seed(1)
    assert found == [random.random() + float(numpy.random.rand()) for _ in found]


def forwards(me: Rank) -> list[int]:
    pipe, whole = of_two(me, "checkpoint")
    batch = {"x": reals(4, WIDTH), "target": reals(4, WIDTH, seed=1)}
    loss, expected = pipe.run_train(**batch), whole_step(whole, batch, {"loss": mean_square}, 2)
    if loss is not None:
        torch.testing.assert_close(loss, expected, **EXACT)
    wanted = dict(whole.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, **EXACT)
    modules = (module for stage in pipe.stages for module in stage.module.modules())
    counts = [module.calls for module in modules if isinstance(module, Drawing)]
    assert counts == [layer.calls for layer in list(whole.layers)[: len(counts)]]
    return counts


def test_a_checkpoint_around_a_layer_computes_it_again(ranks: Pool) -> None:
    """Twice for each of two microbatches, as in the whole model."""
    assert ranks.run(2, forwards) == [[4, 4], [4, 4]]


class Offloading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(partial(torch.add, other=0), lambda x: x):
            x = self.layers[0](x)
        return self.layers[1](x)


def test_other_hooks_for_saved_tensors_are_refused() -> None:
    with pytest.raises(TraceError, match=r"calls layers\.0 \(Linear\) under hooks for the tensors that autograd saves"):
        Stages(Offloading().double(), {"x": reals(2, WIDTH)}, (1, 1))
    with torch.autograd.graph.saved_tensors_hooks(partial(torch.add, other=0), lambda x: x):
        Stages(Deciding("").double(), {"x": reals(2, WIDTH)}, (2, 2))()
