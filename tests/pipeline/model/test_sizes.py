"""Layers are divided among stages by their costs, or as the caller says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline import PipelineCosts, simulate_cost
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.layer_costs import LayerCosts
from symm_overlap.pipeline.model._torch import FakeTensor
from symm_overlap.pipeline.model.sizes import given_costs, layer_costs, sizes_of
from symm_overlap.pipeline.partition import balanced
from tests.pipeline.model.in_one_process import traced
from tests.pipeline.model.models import inputs_of, make, reals

NAMES = tuple(f"blocks.{layer}" for layer in range(6))


def sizes(partition: Any, *, ranks: int = 2, costs: Any = (1,) * 6) -> tuple[int, ...]:
    return sizes_of(partition, NAMES, generate("1F1B", ranks, 4), given_costs(costs, 6))


def test_a_partition_is_told_by_sizes_or_by_the_first_layers_of_stages() -> None:
    assert sizes((1, 5)) == (1, 5)
    assert sizes(["blocks.2"]) == (2, 4)
    assert sizes(["blocks.2", "blocks.5"], ranks=3) == (2, 3, 1)
    assert sizes("even", ranks=4) == (2, 2, 1, 1)
    assert sizes("balanced", costs=(5, 1, 1, 1, 1, 1)) == (1, 5)


def test_the_automatic_partition_is_the_one_that_the_simulator_finds_fastest() -> None:
    costs, schedule = given_costs((9, 1, 1, 1, 3, 3), 6), generate("1F1B", 3, 8)
    found = sizes_of("auto", NAMES, schedule, costs)
    times = {each: simulate_cost(schedule, costs.of_stages(each)).makespan for each in (found, (2, 2, 2))}
    assert times[found] < times[2, 2, 2]
    assert times[found] <= simulate_cost(schedule, costs.of_stages(balanced(costs, 3))).makespan


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ((3, 4), "whose sum is the 6 layers"),
        ((6, 0), "give 2 sizes of at least 1"),
        ((2, 2, 2), "give 2 sizes"),
        (["blocks.2", "blocks.3"], "name the first layer of each of the 1 stages after the first"),
        (["head"], "names head, which is not a layer: the layers are blocks.0"),
        (["blocks.0"], "the layers are called in the order"),
        ("best", '"auto", "balanced", "even"'),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(partition: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sizes(partition)


def test_flops_are_counted_without_memory_and_the_head_counts_with_the_last_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16)), nn.Linear(16, 3)).to(
        "meta"
    )
    found, skeleton, _ = traced(model, {"input": reals(5, 4)}, layer_names=("0", "1", "2"))
    counted = layer_costs("flops", found, skeleton).costs.forward
    flops = [2 * 5 * 4 * 8, 2 * 5 * 8 * 8, 2 * 5 * (8 * 16 + 16 * 3)]
    assert counted == pytest.approx([each / max(flops) for each in flops])
    parameters = [4 * 8 + 8, 8 * 8 + 8, 8 * 16 + 16 + 16 * 3 + 3]
    counted = layer_costs("parameters", found, skeleton).costs.forward
    assert counted == pytest.approx([each / max(parameters) for each in parameters])


def test_the_embedding_counts_with_the_first_layer() -> None:
    model, batch, options = make("gpt2", 3)
    found, skeleton, _ = traced(model, inputs_of(batch, options), layer_cls="GPT2Block")
    first, middle, last = layer_costs("parameters", found, skeleton).costs.forward
    block = sum(parameter.numel() for parameter in model.transformer.h[0].parameters())
    embeddings = model.transformer.wte.weight.numel() + model.transformer.wpe.weight.numel()
    assert first / middle == pytest.approx((block + embeddings) / block)
    assert last > middle


def test_a_model_without_matrix_products_is_shared_out_by_parameters() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4), nn.LayerNorm(4)).double()
    found, skeleton, _ = traced(model, {"input": reals(2, 4)})
    assert layer_costs("flops", found, skeleton).costs.forward == (1, 1, 1)


class Experts(nn.Module):
    """Each row is multiplied with the weight of one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, dtype=torch.bfloat16)
        self.weight = nn.Parameter(torch.zeros(4, 16, 32, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        ends = torch.histc(chosen.float(), 4, 0, 3).cumsum(0).int()
        return x + torch._grouped_mm(x[chosen.argsort()], self.weight, offs=ends)[:, :16]


class PartlyTrained(nn.Module):
    """A model with layers that are frozen, that run without gradients, and of which a part is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
        self.layers[0].requires_grad_(False)
        self.layers[4].requires_grad_(False)
        self.layers[5] = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False).requires_grad_(False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            x = self.layers[1](x)
        for layer in self.layers[2:]:
            x = layer(x)
        return x


@pytest.mark.parametrize("costs", ["flops", "parameters"])
def test_only_what_is_trained_has_a_backward(costs: str) -> None:
    names = [f"layers.{number}" for number in range(6)]
    found, skeleton, _ = traced(PartlyTrained(), {"x": reals(5, 8)}, layer_names=names)
    counted = layer_costs(costs, found, skeleton).costs
    assert counted.forward == (0.5, 0.5, 0.5, 0.5, 0.5, 1)
    assert counted.input_grad == (0, 0, 0, 0.5, 0.5, 1)
    assert counted.weight_grad == (0, 0, 0.5, 0.5, 0, 0.5)


def test_flops_of_experts_are_counted() -> None:
    model = nn.Sequential(Experts(), nn.Linear(16, 16, dtype=torch.bfloat16))
    found, skeleton, _ = traced(model, {"input": reals(5, 16).bfloat16()}, layer_names=("0", "1"))
    flops = [2 * 5 * 16 * 4 + 2 * 5 * 16 * 32, 2 * 5 * 16 * 16]
    assert layer_costs("flops", found, skeleton).costs.forward == pytest.approx([1, flops[1] / flops[0]])


class Uncountable(nn.Linear):
    """As layers of transformers whose experts are called by another operator while the model is traced."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and isinstance(x, FakeTensor):
            raise RuntimeError("no such dtype\nC++ CapturedTraceback")
        return super().forward(x)


def test_a_layer_whose_flops_cannot_be_counted_has_its_parameters_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Uncountable(4, 8), nn.Linear(8, 4)).double()
    found, skeleton, _ = traced(model, {"input": reals(2, 4)}, layer_names=("0", "1", "2"))
    with pytest.warns(UserWarning, match="FLOPs of the layers could not be counted .* costs= .*: no such dtype$"):
        counted = layer_costs("flops", found, skeleton)
    assert counted == layer_costs("parameters", found, skeleton)


def test_costs_may_be_given() -> None:
    mine = LayerCosts(6, PipelineCosts(forward=2.0))
    assert given_costs(mine, 6) is mine
    assert given_costs([1, 2, 4], 3).costs.forward == (0.25, 0.5, 1.0)
    for wrong, layers, message in [(mine, 5, "costs are of 6 layers"), ([1], 2, "1 numbers"), ("time", 2, '"flops"')]:
        with pytest.raises(ValueError, match=message):
            given_costs(wrong, layers)


def test_no_memory_is_allocated_for_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 20, 1 << 20) for _ in range(4)))  # 16 TiB
    found, skeleton, _ = traced(model, {"input": torch.ones(2, 1 << 20)})
    assert layer_costs("flops", found, skeleton).costs.forward == (1, 1, 1, 1)
