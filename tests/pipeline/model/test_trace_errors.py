"""If a model cannot be traced, the message says where and what to do, and this advice works."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import PipelineModel, TraceError
from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import WIDTH, make, reals


def test_a_choice_between_layers_is_found_with_its_line_and_the_way_out() -> None:
    model, batch, _ = make("choosy", 3)
    with pytest.raises(TraceError) as caught:
        Stages(model, {"x": batch["x"]}, (1, 2), layer_names="layers.*")
    message = str(caught.value)
    assert "Choosy cannot be traced in the model itself (Choosy), " in message
    assert "models.py, line " in message
    assert "    if x.sum() > 1e9:\n" in message
    assert "trace=False" in message


def test_a_batch_that_does_not_fit_is_told_without_advice_for_another_mistake() -> None:
    hint = r"\. Did you mean 'input'\?" if sys.version_info >= (3, 13) else ""
    with pytest.raises(TraceError, match=rf"TypeError: .*unexpected keyword argument 'inputs'{hint}$"):
        Stages(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), {"inputs": reals(2, WIDTH)}, (1, 1))


class Hungry(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_too_little_memory_is_told_without_advice_for_another_mistake() -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Hungry(WIDTH, WIDTH)]
    with pytest.raises(TraceError, match=r"OutOfMemoryError: CUDA out of memory$"):
        Stages(nn.Sequential(*layers).double(), {"input": reals(2, WIDTH)}, (1, 1), layer_names="*")


class Uncalled(nn.Module):
    """A model that calls no module of its list: they are lists themselves, or it calls their forward."""

    def __init__(self, lists: bool) -> None:
        super().__init__()
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.layers = nn.ModuleList(nn.ModuleList([each]) for each in linears) if lists else nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer[0](x) if isinstance(layer, nn.ModuleList) else layer.forward(x)
        return x


@pytest.mark.parametrize("lists", [True, False])
def test_layers_that_are_never_called_are_named(lists: bool) -> None:
    batch = {"x": reals(2, WIDTH)}
    with pytest.raises(TraceError, match=r"does not call any of the layers layers\.0, layers\.1, .*layer_names"):
        Stages(Uncalled(lists).double(), batch, (1, 1))
    if lists:
        model = Uncalled(lists).double()
        found = Stages(model, batch, (1, 1), layer_names="layers.*.0")()
        torch.testing.assert_close(found, model(**batch), rtol=0, atol=0)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), Picky())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Picky(nn.Module):
    def forward(self, this: Tensor) -> Tensor:
        return this if bool(this.isfinite().all()) else this.nan_to_num()


def test_a_choice_inside_of_a_layer_is_found_with_the_name_of_the_module() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Gate()).double()
    with pytest.raises(TraceError, match=r"cannot be traced in 1\.inner\.1 \(Picky\), .*\n.*this if bool\(this"):
        Stages(model, {"input": reals(2, WIDTH)}, (1, 1))


def test_a_choice_in_a_module_of_torch_is_found_too() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double()
    batch = {"src": reals(2, 5, WIDTH), "mask": torch.zeros(5, 5, dtype=torch.float64)}
    with pytest.raises(TraceError, match=r"the model itself \(TransformerEncoder\), .*transformer.py, line"):
        Stages(model, batch, (1, 1))


def test_a_cache_cannot_pass_between_layers() -> None:
    model, batch, _ = make("gpt2", 2)
    model.config.use_cache = True
    with pytest.raises(TraceError, match=r"transformer\.h\.0 \(GPT2Block\) is given a DynamicCache.*use_cache=False"):
        Stages(model, batch, (1, 1), layer_cls="GPT2Block")
    Stages(model, {**batch, "use_cache": False}, (1, 1), layer_cls="GPT2Block")


class Giving(nn.Module):
    """A model that gives its layers a number which it has computed from a tensor, or a module."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.layers, self.gives = nn.ModuleList(GivenLayer() for _ in range(2)), gives

    def forward(self, x: Tensor) -> Tensor:
        given = {"a bool": lambda: x.any().item(), "a float": lambda: x.sum().item(), "a module": nn.Tanh}[self.gives]()
        for layer in self.layers:
            x = layer(x, given)
        return x


class GivenLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: object) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("gives", "error"),
    [
        ("a bool", r"is given a SymBool, .*pass the tensor"),
        ("a float", r"is given a SymFloat, .*pass the tensor"),
        ("a module", r"is given a Tanh, .*an attribute of the layer"),
    ],
)
def test_a_number_of_a_tensor_or_a_module_cannot_pass_between_layers(gives: str, error: str) -> None:
    with pytest.raises(TraceError, match=error):
        Stages(Giving(gives).double(), {"x": reals(2, WIDTH)}, (1, 1))


class Noting(nn.Module):
    """A model whose layers append to a list that they receive, or return an unknown object."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NotingLayer(how) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, seen)
        return x + sum(seen)


class NotingLayer(nn.Linear):
    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        y = super().forward(x)
        if self.how == "append":
            seen.append(y)
        return y if self.how == "append" else object()  # type: ignore[return-value]


def test_a_layer_that_changes_a_list_that_it_is_given_is_refused() -> None:
    with pytest.raises(TraceError, match=r"layers\.0 \(NotingLayer\) changes one of its arguments"):
        Stages(Noting("append").double(), {"x": reals(2, WIDTH)}, (1, 1))


def test_a_layer_that_returns_something_unknown_is_refused() -> None:
    with pytest.raises(TraceError, match=r"layers\.0 \(NotingLayer\) returns a object, which is not a tensor"):
        Stages(Noting("object").double(), {"x": reals(2, WIDTH)}, (1, 1))


class Frozen(nn.Module):
    """A model that calls the module before its layers without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.embed(x)
        return self.layers[1](self.layers[0](x))


def test_modules_without_gradients_are_called_as_such() -> None:
    batch = {"x": reals(2, WIDTH)}
    model = Frozen().double()
    stages = Stages(model, batch, (1, 1))
    assert "embed" in stages.parts[0].modules
    torch.testing.assert_close(stages(), model(**batch), rtol=0, atol=0)
    stages().sum().backward()
    assert model.embed.weight.grad is None
    assert model.layers[0].weight.grad is not None


def test_there_is_no_pipeline_without_a_process_group() -> None:
    with pytest.raises(ValueError, match="there is no process group"):
        PipelineModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_microbatches=2)
