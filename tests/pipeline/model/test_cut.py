"""Stages that run one after the other compute exactly what the model does, and send only the values that are needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import TraceError
from symm_overlap.pipeline.model.skeleton import Skeleton
from symm_overlap.pipeline.model.stage_module import run_of
from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import LENGTH, WIDTH, Batch, inputs_of, make, reals

TRACED = ["mlp", "unet", "shared", "encoder", "gpt2", "llama", "mixtral"]
LAYERS = ("layer_cls", "layer_names")


def leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def total(value: Any) -> Tensor:
    return sum(leaf.double().square().mean() for leaf in leaves(value))


def of(name: str, layers: int) -> tuple[nn.Module, Batch, dict[str, Any]]:
    model, batch, options = make(name, layers)
    return model, inputs_of(batch, options), {key: options[key] for key in LAYERS if key in options}


@pytest.mark.parametrize(
    "sizes", [(1, 3), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((4,), (1, 1, 1, 1)))]
)
@pytest.mark.parametrize("name", TRACED)
def test_stages_compute_what_the_model_computes_to_the_last_bit(name: str, sizes: tuple[int, ...]) -> None:
    model, batch, layers = of(name, 4)
    whole = copy.deepcopy(model)
    stages = Stages(model, batch, sizes, **layers)
    found, expected = stages(), whole(**batch)
    assert type(found) is type(expected)
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    total(found).backward()
    total(expected).backward()
    for (key, one), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15, msg=key)


def test_a_stage_has_only_the_modules_that_it_calls_under_their_names() -> None:
    model, batch, layers = of("gpt2", 4)
    stages = Stages(model, batch, (1, 2, 1), **layers)
    assert [part.modules for part in stages.parts] == [
        ("transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0"),
        ("transformer.h.1", "transformer.h.2"),
        ("transformer.h.3", "transformer.ln_f", "lm_head"),
    ]
    keys = [key for stage in stages.modules for key in stage.state_dict()]
    assert sorted(keys) == sorted(model.state_dict())
    assert stages.modules[1].transformer.h.get_submodule("1") is model.transformer.h[1], "a stage must not copy modules"


def test_what_follows_from_the_batch_alone_is_computed_by_every_stage_and_not_sent() -> None:
    model, batch, layers = of("gpt2", 4)
    stages = Stages(model, batch, (1, 2, 1), **layers)
    stages()
    assert [len(sent) for sent in stages.sent] == [1, 1], "the attention mask must not be sent"
    assert not [node for part in stages.parts for node in part.graph.nodes if "assert" in str(node.target)]


def test_a_value_goes_through_the_stages_between_until_it_is_used() -> None:
    model, batch, layers = of("unet", 8)
    stages = Stages(model, batch, (1,) * 8, **layers)
    stages()
    # On the way down, each stage sends one value more. The batch itself is not sent. Before each layer on the way up,
    # one of the values is joined with the latest one.
    assert [len(sent) for sent in stages.sent] == [1, 2, 3, 3, 2, 1, 1]


class Masked(nn.Module):
    """A model that writes a mask in place, changes a value in place, and counts calls in a buffer."""

    def __init__(self, before_cut: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.same = nn.Identity()
        self.before_cut = before_cut
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        mask = torch.zeros(LENGTH, WIDTH, dtype=x.dtype)
        mask[0] = 1
        self.same(mask)[:, 1].add_(2)
        with torch.no_grad():
            scale = self.layers[0].weight.norm() + torch.tensor([1.0, 2.0]).sum()
        value = self.layers[0](x)
        if self.before_cut:
            value.mul_(scale)
        y = self.layers[1](value) * mask
        if not self.before_cut:
            value.mul_(scale)
        return self.layers[2](y) * mask + value


def test_what_is_changed_in_place_before_the_cut_is_right_everywhere() -> None:
    torch.manual_seed(0)
    model, batch = Masked(True).double(), {"x": reals(2, LENGTH, WIDTH)}
    whole = copy.deepcopy(model)
    stages = Stages(model, batch, (1, 1, 1))
    torch.testing.assert_close(stages(), whole(**batch), rtol=0, atol=0)
    assert [len(sent) for sent in stages.sent] == [1, 2], "stages must compute the mask, and send the changed value"
    assert model.calls == whole.calls == 1


def test_what_is_changed_in_place_behind_the_cut_is_refused() -> None:
    with pytest.raises(TraceError, match=r"changes a value in place .*test_cut.py.* value.mul_\(scale\)"):
        Stages(Masked(False).double(), {"x": reals(2, LENGTH, WIDTH)}, (1, 1, 1))
    Stages(Masked(False).double(), {"x": reals(2, LENGTH, WIDTH)}, (2, 1))


@pytest.mark.parametrize("sizes", [(3, 1), (2, 2)])
def test_layers_may_change_what_the_previous_layer_returns(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanhshrink(), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)]
    model, batch = nn.Sequential(*layers).double(), {"input": reals(2, WIDTH)}
    torch.testing.assert_close(Stages(model, batch, sizes)(), model(**batch), rtol=0, atol=0)


class Noisy(nn.Module):
    """A model in which two stages need the same random values. They depend only on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        noise, more = self.dropout(x), torch.rand_like(x)
        return self.layers[1](self.layers[0](noise + more)) + noise + more


def test_random_values_are_drawn_once_and_sent() -> None:
    model, batch = Noisy().double(), {"x": reals(2, WIDTH)}
    stages = Stages(model, batch, (1, 1))
    torch.manual_seed(1)
    found = stages()
    torch.manual_seed(1)
    torch.testing.assert_close(found, model(**batch), rtol=0, atol=0)
    assert [part.modules for part in stages.parts] == [("dropout", "layers.0"), ("layers.1",)]
    assert len(stages.sent[0]) == 3


def test_a_parameter_that_is_put_in_the_place_of_another_is_used() -> None:
    model, batch, layers = of("unet", 2)
    stages = Stages(model, batch, (2,), **layers)
    (part,), (stage,) = stages.parts, stages.modules
    run = run_of(part, stage)
    torch.testing.assert_close(run([], stages.tensors)[0], model(**batch)["loss"], rtol=0, atol=0)
    model.scale = stage.scale = nn.Parameter(torch.full_like(model.scale, 3.0))
    torch.testing.assert_close(run([], stages.tensors)[0], model(**batch)["loss"], rtol=0, atol=0)


def test_equal_tensors_get_different_fakes() -> None:
    x, skeleton = reals(2, WIDTH), Skeleton(Noisy(), torch.device("cpu"))
    assert skeleton.fake(x) is not skeleton.fake(x)


class Rows(nn.Module):
    """A model with two inputs. They stay separate inputs even if the same tensor is passed for both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, pairs: tuple[Tensor, dict[str, Tensor]], factor: float) -> tuple[Tensor, float]:
        one, others = pairs
        for layer in self.layers:
            one = layer(one) - factor * others["y"]
        return one, factor


def test_inputs_may_be_nested_and_equal_tensors_stay_two_inputs() -> None:
    torch.manual_seed(0)
    model, x, y = Rows().double(), reals(2, WIDTH), reals(2, WIDTH, seed=1)
    stages = Stages(model, {"pairs": (x, {"y": x}), "factor": 2.0}, (1, 1))
    first, second = stages.tensors
    stages.tensors[second] = y
    assert "y" in second
    assert "y" not in first
    found, factor = stages()
    assert factor == 2.0
    torch.testing.assert_close(found, model((x, {"y": y}), 2.0)[0], rtol=0, atol=0)
    assert [len(sent) for sent in stages.sent] == [1]
