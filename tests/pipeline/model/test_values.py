"""For a model on the meta device, a rank allocates memory only for its own part, and every parameter gets a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from symm_overlap.pipeline.model import PipelineModel
from tests.pipeline.model.models import MODELS, make
from tests.pipeline.model.reference import EXACT, same_gradients, whole_step
from tests.ranks import Pool, Rank


def on_meta(name: str, layers: int) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name][0](layers)[0].double()


def from_a_state_dict(me: Rank, name: str, drop: tuple[str, ...]) -> tuple[int, int]:
    whole, batch, options = make(name, 4)
    values = {key: value for key, value in whole.state_dict().items() if key not in drop}
    model = on_meta(name, 4)
    init = model._init_weights if hasattr(model, "_init_weights") else None
    schedule = {"schedule": "Interleaved1F1B", "num_microbatches": 4}
    pipe = PipelineModel(model, group=me.group, state_dict=values, init=init, **schedule, **options)
    loss, expected = pipe.run_train(**batch), whole_step(whole, batch, options, 4)
    if loss is not None:
        torch.testing.assert_close(loss, expected, **EXACT)
    same_gradients(pipe, whole)
    mine = sum(parameter.numel() for parameter in pipe.parameters())
    real = {id(parameter): parameter.numel() for parameter in model.parameters() if not parameter.is_meta}
    return mine, sum(real.values())


@pytest.mark.parametrize(
    ("name", "drop"),
    [
        ("gpt2", ("lm_head.weight",)),
        pytest.param("gpt2", ("transformer.wte.weight",), marks=pytest.mark.slow),
        pytest.param("llama", (), marks=pytest.mark.slow),
        ("mlp", ()),
    ],
)
def test_values_come_from_a_state_dict_of_the_whole_model(ranks: Pool, name: str, drop: tuple[str, ...]) -> None:
    """One of the names of a tied parameter is enough. Parameters that a rank does not need stay on the meta device."""
    found = ranks.run(2, from_a_state_dict, name, drop, timeout=120)
    total = sum(parameter.numel() for parameter in make(name, 4)[0].parameters())
    assert all(mine == real < total for mine, real in found)


def by_reset_parameters(me: Rank) -> list[Any]:
    _, batch, options = make("shared", 4)
    torch.manual_seed(me.rank)  # after `make`, which sets its own seed
    model = on_meta("shared", 4)

    def init(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if name in ("positions", "table"):
                nn.init.normal_(value)

    pipe = PipelineModel(model, group=me.group, num_microbatches=4, init=init, **options)
    values = []
    for run in (pipe.build, pipe.run_train):  # they are equal before the first step and after it
        run(**batch)
        values.append({name: pipe.state_dict()[name].clone() for name in ("embed.weight", "layers.0.bias")})
    stage = dict(pipe.stages[0].module.named_parameters(remove_duplicate=False))
    biases = {id(parameter) for name, parameter in stage.items() if name.endswith(".bias")}
    return [len(biases), *values]


def test_tied_parameters_stay_tied_and_start_equal(ranks: Pool) -> None:
    (first, *values), (second, *others) = ranks.run(2, by_reset_parameters)
    assert (first, second) == (1, 1), "the layers of a stage must share one bias"
    torch.testing.assert_close(values, others, rtol=0, atol=0)


class Constant(nn.Module):
    """A module with a parameter that nothing initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def without_a_value(me: Rank) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Constant())
    pipe = PipelineModel(model, layer_names="*", num_microbatches=2, group=me.group, loss=lambda y, t: (y - t).sum())
    error, wanted = (
        (ValueError, r"^1\.scale \(Constant\) was on the meta device")
        if me.rank
        else (
            RuntimeError,
            r"rank 1 of the pipeline could not make its part of the model: ValueError: 1\.scale",
        )
    )
    with pytest.raises(error, match=wanted):
        pipe.run_train(input=torch.ones(2, 4), target=torch.ones(2, 4))


def test_a_parameter_that_gets_no_value_is_named_on_every_rank(ranks: Pool) -> None:
    ranks.run(2, without_a_value)


class Masks(nn.Linear):
    """A layer with buffers whose dtypes have no value that is never used."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.zeros(4, dtype=torch.uint8))
        self.register_buffer("flags", torch.zeros(4, dtype=torch.bool))


def masked(me: Rank, forgotten: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Masks(), Masks())

    def init(module: nn.Module) -> None:
        module.reset_parameters()
        for name, buffer in module.named_buffers():
            if name != forgotten:
                buffer.zero_()

    pipe = PipelineModel(model, num_microbatches=2, group=me.group, init=init)
    if forgotten:
        with pytest.raises(ValueError, match=rf"^{me.rank}\.{forgotten} \(Masks\) was on the meta device"):
            pipe.build(input=torch.ones(2, 4))
    else:
        pipe.build(input=torch.ones(2, 4))
        assert not any(buffer.any() for stage in pipe.stages for buffer in stage.module.buffers())


@pytest.mark.parametrize("forgotten", ["", "mask", "flags"])
def test_zeros_are_a_value_and_what_nothing_has_written_to_is_none(ranks: Pool, forgotten: str) -> None:
    ranks.run(2, masked, forgotten)


def shapes_differ(me: Rank) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    values = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).state_dict()
    pipe = PipelineModel(model, num_microbatches=2, group=me.group, state_dict=values)
    with pytest.raises((ValueError, RuntimeError), match=r"1\.(weight|bias) has shape \(4,( 4)?\), but shape \(3,"):
        pipe.build(input=torch.ones(2, 4))


def test_a_state_dict_of_another_shape_is_refused(ranks: Pool) -> None:
    ranks.run(2, shapes_differ)


class Together(nn.Module):
    """A wrapper, whose state dict has other names."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def names_differ(me: Rank, init: bool, device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    values = {**Together().state_dict(), f"{me.rank}.bias": torch.ones(4)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own = (lambda module: module.reset_parameters()) if init else None
    pipe = PipelineModel(model, num_microbatches=2, group=me.group, state_dict=values, init=own)
    lacks = rf"state_dict= lacks 1 tensors of this rank: {me.rank}\.weight\."
    if init:
        with pytest.warns(UserWarning, match=lacks):
            pipe.build(input=torch.ones(2, 4))
        assert bool((pipe.stages[0].module.get_parameter(f"{me.rank}.bias") == 1).all())
        weight = pipe.stages[0].module.get_parameter(f"{me.rank}.weight")
        assert weight.is_cpu
        assert device == "meta" or torch.equal(weight, before[f"{me.rank}.weight"]), "it must keep its values"
    else:
        with pytest.raises(ValueError, match=rf"{lacks} It has .*, model\.0\.bias, "):
            pipe.build(input=torch.ones(2, 4))


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("init", [False, True])
def test_a_state_dict_with_other_names_is_noticed(ranks: Pool, init: bool, device: str) -> None:
    ranks.run(2, names_differ, init, device)


def of_a_model_with_values(me: Rank) -> None:
    model, values = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
    with torch.no_grad():
        for value in values.state_dict().values():
            value.fill_(3)
    pipe = PipelineModel(model, num_microbatches=2, group=me.group, state_dict=values.state_dict())
    pipe.build(input=torch.ones(4, 4))
    assert all(bool((value == 3).all()) for value in pipe.state_dict().values())


def test_a_state_dict_also_sets_a_model_that_has_values(ranks: Pool) -> None:
    ranks.run(2, of_a_model_with_values)


class Shifted(nn.Linear):
    """A layer with a buffer that state dicts do not contain."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "shift"):
            self.shift.fill_(1)


def not_in_state_dicts(me: Rank) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Shifted(), Shifted())
    values = nn.Sequential(Shifted(), Shifted()).state_dict()
    pipe = PipelineModel(model, num_microbatches=2, group=me.group, state_dict=values).build(input=torch.ones(2, 4))
    module = pipe.stages[0].module
    assert bool((module.get_buffer(f"{me.rank}.shift") == 1).all())
    torch.testing.assert_close(module.get_parameter(f"{me.rank}.weight"), values[f"{me.rank}.weight"], rtol=0, atol=0)


def test_buffers_that_state_dicts_do_not_contain_are_reset(ranks: Pool) -> None:
    ranks.run(2, not_in_state_dicts)
