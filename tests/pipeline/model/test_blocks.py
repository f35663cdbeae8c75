"""Layers in blocks such as ``with torch.no_grad()`` and ``with torch.autocast(...)``, and in checkpoints."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from symm_overlap.pipeline.model import PipelineModel, TraceError
from tests.pipeline.model.blocks import Blocks, Layer, Program, program
from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import WIDTH, mean_square, reals
from tests.pipeline.model.reference import EXACT, same_gradients, whole_step
from tests.quick import one_in
from tests.ranks import Pool, Rank

LAYER: tuple[str, Program] = ("layer", [])
X = torch.linspace(-2, 2, 3 * WIDTH).view(3, WIDTH)


def gradients(model: nn.Module, found: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    if found.requires_grad:
        found.sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(steps: Program, cuts: random.Random) -> None:
    """Compare a model that is cut with the whole one."""
    torch.manual_seed(0)
    model = Blocks(steps, reentrant=True)
    whole = copy.deepcopy(model)
    whole.reentrant = False
    expected = whole(X)
    of_whole = gradients(whole, expected)
    ends = sorted(cuts.sample(range(1, len(model.layers)), cuts.randint(1, min(3, len(model.layers) - 1))))
    sizes = [end - start for start, end in zip([0, *ends], [*ends, len(model.layers)], strict=True)]
    found = Stages(model, {"x": X}, sizes, layer_cls="Layer")()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for name, gradient in gradients(model, found).items():
        assert (gradient is None) == (of_whole[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, of_whole[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("seed", one_in(4, range(48)))
def test_layers_are_called_in_the_blocks_of_the_model(seed: int) -> None:
    compare(program(random.Random(seed)), random.Random(seed))


@pytest.mark.parametrize(
    "steps",
    [
        [("bfloat16", [("no_grad", [("weight", []), LAYER]), LAYER])],  # torch.export's operators lose this one
        [("checkpoint", [LAYER, ("checkpoint", [LAYER])])],  # hooks run without gradients
        [("checkpoint", [("weight", []), LAYER])],
        [("reentrant checkpoint", [LAYER, ("reentrant checkpoint", [LAYER])])],
        [("no_grad", [LAYER, ("enable_grad", [LAYER]), LAYER])],
        [("inference", [("weight", []), LAYER])],
        [("bfloat16", [LAYER, ("not bfloat16", [LAYER]), LAYER])],
        [("no_grad", [("vmap", [LAYER])])],
    ],
    ids=str,
)
def test_blocks_in_each_other(steps: Program) -> None:
    compare(steps, random.Random(0))


class Aliased(nn.Module):
    """A model that changes a value through a view of it, with a value of an earlier stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](x) * 2
        second.view(-1).add_(first.view(-1))
        return self.layers[2](second)


def test_what_is_written_to_a_view_is_trained() -> None:
    torch.manual_seed(0)
    model = Aliased()
    of_whole = gradients(model, model(X))
    of_stages = gradients(model, Stages(model, {"x": X}, (1, 1, 1), layer_cls="Layer")())
    for name, gradient in of_stages.items():
        torch.testing.assert_close(gradient, of_whole[name], msg=lambda text, name=name: f"{name}: {text}")


class Thrice(nn.Linear):
    """A layer that uses its weight three times."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(super().forward(x))
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Thrice(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layers[1](self.layers[0](x))
        return y.float()


def test_autocast_casts_a_weight_once_in_a_layer() -> None:
    torch.manual_seed(0)
    model = Recurrent()
    of_whole = gradients(model, model(X))
    of_stages = gradients(model, Stages(model, {"x": X}, (1, 1), layer_cls="Thrice")())
    for name, gradient in of_stages.items():
        torch.testing.assert_close(
            gradient, of_whole[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


class OfInference(nn.Linear):
    """A layer that would compute gradients if it were not called in inference mode."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x) * x


class Inferring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfInference(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            x = self.layers[0](x * 2)
        return self.layers[1](x.clone())


def test_layers_are_traced_in_inference_mode() -> None:
    model = Inferring()
    stages = Stages(model, {"x": X}, (1, 1), layer_cls="OfInference")
    torch.testing.assert_close(stages(), model(X), rtol=0, atol=0)


class Masked(nn.Module):
    """A model that computes something in a block that has layers too."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(3))
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mask = torch.ones(x.shape[0], 1).cumsum(0) > x.mean()
            y = self.layers[0](x)
            seen = y.view(-1)
        y = y * 1
        hidden = torch._C.DisableTorchFunction() if self.what.startswith("hidden") else nullcontext()
        with hidden, torch.autocast("cpu", torch.bfloat16) if "autocast" in self.what else torch.no_grad():
            y = self.layers[1](torch.where(mask, y, y * 2))
            if self.what == "in place":
                seen.mul_(2)
                y = y + seen.view(y.shape)
        return self.layers[2](torch.where(mask, y, 1))


def test_masks_that_are_computed_in_a_block_are_not_sent() -> None:
    model = Masked("mask")
    stages = Stages(model, {"x": X}, (1, 1, 1), layer_cls="Layer")
    torch.testing.assert_close(stages(), model(X), rtol=0, atol=0)
    assert [len(sent) for sent in stages.sent] == [1, 1]


def test_a_value_of_an_earlier_stage_is_not_changed_in_a_block() -> None:
    with pytest.raises(TraceError, match="changes a value in place that belongs to an earlier stage"):
        Stages(Masked("in place"), {"x": X}, (1, 1, 1), layer_cls="Layer")
    stages = Stages(model := Masked("in place"), {"x": X}, (2, 1), layer_cls="Layer")
    torch.testing.assert_close(stages(), model(X), rtol=0, atol=0)


@pytest.mark.parametrize(("what", "how"), [("hidden", "without gradients"), ("hidden autocast", "under autocast")])
def test_a_mode_that_is_not_recorded_is_an_error(what: str, how: str) -> None:
    with pytest.raises(TraceError, match=rf"calls layers\.1 {how} in a way that torch\.export does not record"):
        Stages(Masked(what), {"x": X}, (1, 1, 1), layer_cls="Layer")


class Frozen(nn.Module):
    """A model that calls some of its first layers without gradients, and the others in checkpoints. Nothing trains the
    layers before those without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = checkpoint(layer, x, use_reentrant=False)
        with torch.no_grad():
            for layer in self.layers[3:5]:
                x = torch.tanh(layer(x * self.scale))
        for layer in self.layers[5:]:
            x = checkpoint(layer, x, use_reentrant=False) + self.scale
        return x


def train_without_gradients(me: Rank, schedule: str) -> None:
    torch.manual_seed(0)
    model = Frozen().double()
    whole = copy.deepcopy(model)
    pipe = PipelineModel(
        model, "Linear", num_microbatches=4, schedule=schedule, loss=mean_square, partition="even", group=me.group
    )
    batch = {"x": reals(4, WIDTH), "target": reals(4, WIDTH, seed=1)}
    for _ in range(2):
        loss, expected = pipe.run_train(**batch), whole_step(whole, batch, {"loss": mean_square}, 4)
        if loss is not None:
            torch.testing.assert_close(loss, expected, **EXACT)
        same_gradients(pipe, whole)
    found = pipe.run_eval(x=batch["x"])
    if found is not None:
        torch.testing.assert_close(found, whole(batch["x"]).detach(), **EXACT)


@pytest.mark.parametrize("schedule", one_in(3, ["1F1B", "ZB-H1", "ZBV", "DualPipeV", "Interleaved1F1B", "GPipe"]))
@pytest.mark.parametrize("world", [1, 2])
def test_the_first_stages_may_run_without_gradients(ranks: Pool, world: int, schedule: str) -> None:
    ranks.run(world, train_without_gradients, schedule)


def test_a_reentrant_checkpoint_recomputes_its_layers() -> None:
    torch.manual_seed(0)
    model = Blocks([("reentrant checkpoint", [LAYER])], reentrant=True)
    counts: list[str] = []
    for name, layer in model.layers.named_children():
        layer.register_forward_pre_hook(lambda *_, name=name: counts.append(name))
    stages = Stages(model, {"x": X}, (1, 2), layer_cls="Layer")
    counts.clear()
    found = stages()
    assert counts == ["0", "1", "2"]
    found.sum().backward()
    assert counts == ["0", "1", "2", "0"]
