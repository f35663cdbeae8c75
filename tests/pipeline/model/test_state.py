"""What a model's own code sets on modules is missing when the stages run, so it is refused. Modules may set theirs."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import TraceError
from symm_overlap.pipeline.model.batch import Batch
from symm_overlap.pipeline.model.layers import layers_of, whole_modules
from symm_overlap.pipeline.model.skeleton import Skeleton
from symm_overlap.pipeline.model.trace.tracer import trace
from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import WIDTH, reals


class Layer(nn.Module):
    """A layer that keeps a cache and counts its calls, and that uses an attribute which others set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate: Tensor | None = None
        self.table: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=x.dtype)
        return self.linear(x) * self.table + (0 if self.gate is None else self.gate)


class Setting(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.steps = how, 0
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.table: Tensor | None = None
        self.seen: list[Tensor] = []
        self.lengths: dict[str, int] = {}
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "list":
            self.seen.append(x)
        elif self.how == "dict":
            self.lengths["x"] = len(x)
        elif self.how == "list for a while":
            self.seen.append(2 * x)
            x = self.seen.pop()
        elif self.how == "parameter":
            self.scale = nn.Parameter(torch.zeros(WIDTH))
        elif self.how == "functional":
            x = torch.func.functional_call(self.layers[0], {"linear.bias": self.scale}, (x,))
        elif self.how == "counter":
            self.steps += 1
        elif self.how == "buffer":
            self.mean = 0.9 * self.mean + x.detach().mean(0)
        elif self.how == "layer":
            self.layers[1].gate = x.abs()
        elif self.table is None:
            self.table = torch.arange(WIDTH, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x) * self.scale + self.mean + self.steps
        return x if self.table is None else x * self.table


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("counter", r"steps in its forward"),
        ("buffer", r"mean in its forward, and the stages would use the old value: change a buffer in place"),
        ("layer", r"layers\.1\.gate, an attribute inside a layer"),
        ("list", r"seen in its forward"),
        ("dict", r"lengths in its forward"),
        ("parameter", r"scale in its forward"),
        ("functional", r"layers\.0\.linear\.bias, an attribute inside"),
    ],
)
def test_state_that_a_model_sets_between_layers_is_refused(how: str, what: str) -> None:
    with pytest.raises(TraceError, match=f"the model (sets|changes) {what}"):
        Stages(Setting(how).double(), {"x": reals(2, WIDTH)}, (1, 1))


@pytest.mark.parametrize("how", ["cache", "list for a while"])
def test_caches_and_the_state_of_layers_are_right(how: str) -> None:
    torch.manual_seed(0)
    model, batch = Setting(how).double(), {"x": reals(2, WIDTH)}
    stages = Stages(model, batch, (1, 1))
    found = stages()
    assert [layer.calls for layer in model.layers] == [1, 1]
    torch.testing.assert_close(found, model(**batch), rtol=0, atol=0)


class Noting(Setting):
    """A model that keeps the shape of its latest input, which nothing uses, and a cache in a buffer."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.register_buffer("rows", None)

    def forward(self, x: Tensor) -> Tensor:
        self.shape = tuple(x.shape)
        if self.rows is None:
            self.rows = torch.ones(len(x), 1, dtype=x.dtype)
        x = x * self.rows
        y: Tensor = super().forward(x)
        return y


def test_a_model_may_fill_an_attribute_for_batches_of_several_sizes() -> None:
    model = Noting("cache").double()
    skeleton = Skeleton(model, torch.device("cpu"))
    layers = layers_of(model, None, None)
    whole = whole_modules(skeleton.model, layers)
    for rows in (2, 3, 2):
        read = Batch.of({"x": reals(rows, WIDTH)}, None, {}, 1)
        trace(skeleton, whole, layers, read.inputs.flat, read.microbatches(1)[0])
        assert not hasattr(skeleton.model, "shape")
        assert skeleton.model.rows is None


class Frozen(OrderedDict[str, int]):
    """A dictionary such as the configuration of models in diffusers."""

    def update(self, *args: object, **kwargs: object) -> None:
        raise TypeError("it is frozen")

    clear = __delitem__ = pop = update  # type: ignore[assignment]


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.config = Frozen(factor=3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.config["factor"] * layer(x)
        return x


def test_a_model_may_have_a_dictionary_that_cannot_be_changed() -> None:
    torch.manual_seed(0)
    model, batch = Configured().double(), {"x": reals(2, WIDTH)}
    torch.testing.assert_close(Stages(model, batch, (1, 1))(), model(**batch), rtol=0, atol=0)


class Repeated(nn.Module):
    """A model in which one layer has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(2 * [Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_layer_may_have_two_names() -> None:
    torch.manual_seed(0)
    model, batch = Repeated().double(), {"x": reals(2, WIDTH)}
    stages = Stages(model, batch, (1, 1), layer_names="layers.0")
    torch.testing.assert_close(stages(), model(**batch), rtol=0, atol=0)
