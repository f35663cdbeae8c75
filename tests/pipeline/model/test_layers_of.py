"""Layers are found by class, by name, or as the largest list of modules. All other modules are called unchanged."""

from __future__ import annotations

import pytest
from torch import nn

from symm_overlap.pipeline.model.layers import layers_of, whole_modules
from tests.pipeline.model.models import make


def test_layers_are_the_outermost_modules_of_a_class() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh())))
    assert layers_of(model, nn.Sequential) == ("1",)
    assert layers_of(model, (nn.Linear, "Tanh")) == ("0", "1.0", "1.1.0")


def test_layers_are_named_with_patterns_that_stop_at_dots() -> None:
    model, _, _ = make("unet", 4)
    assert layers_of(model, layer_names="down.*") == ("down.0", "down.1")
    assert layers_of(model, layer_names=("up.1", "down.*")) == ("down.0", "down.1", "up.1")


@pytest.mark.parametrize(("name", "first"), [("mlp", "blocks.0"), ("gpt2", "transformer.h.0"), ("encoder", "layers.0")])
def test_by_default_layers_are_the_modules_of_the_largest_list(name: str, first: str) -> None:
    found = layers_of(make(name, 4)[0])
    assert len(found) == 4
    assert found[0] == first


def test_everything_around_the_layers_is_called_as_it_is() -> None:
    model, _, _ = make("gpt2", 2)
    assert list(whole_modules(model, layers_of(model))) == [
        *(f"transformer.{name}" for name in ("wte", "wpe", "drop", "h.0", "h.1", "ln_f")),
        "lm_head",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_cls": "Blocks"}, "Mlp has no module of Blocks: its modules are of Linear, Sequential, Tanh"),
        ({"layer_names": "block.*"}, r"Mlp has no module 'block\.\*': is it blocks"),
        ({"layer_names": ("blocks", "blocks.0")}, r"layer blocks\.0 is inside layer blocks"),
        ({"layer_names": "head", "layer_cls": nn.Linear}, "layer_cls or layer_names, not both"),
    ],
)
def test_layers_that_cannot_be_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers_of(make("mlp", 2)[0], **arguments)


def test_a_model_without_a_list_must_be_told() -> None:
    with pytest.raises(ValueError, match="give layer_cls or layer_names"):
        layers_of(nn.Linear(2, 2))
