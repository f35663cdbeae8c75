"""Determine how many layers each stage has: as given, or from what the layers cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from ..layer_costs import LayerCosts
from ..partition import auto_partition, balanced, even
from ..schedule import Schedule
from ..simulation.costs import PipelineCosts
from .flops import flops_of_calls
from .skeleton import Skeleton
from .trace.tracer import Traced
from .trained import backward_of_calls

Costs = str | Sequence[float] | LayerCosts
Partition = str | Sequence[int] | Sequence[str]


def sizes_of(partition: Partition, names: Sequence[str], schedule: Schedule, costs: LayerCosts) -> tuple[int, ...]:
    """Return how many layers each stage has.

    Args:
        partition: "auto", "balanced" or "even", the sizes themselves, or the names of the first layers of all stages
            except the first.
        names: the layers in the order in which they are called.

    Raises:
        ValueError: there are fewer layers than stages, or ``partition`` does not fit.
    """
    stages = schedule.stages
    if partition == "even":
        return even(len(names), stages)
    if partition == "balanced":
        return balanced(costs, stages)
    if partition == "auto":
        return auto_partition(schedule, costs).sizes
    if isinstance(partition, str):
        raise ValueError(f'partition is {partition!r}: give "auto", "balanced", "even", sizes, or names of layers')
    if all(isinstance(each, str) for each in partition):
        return _sizes_between([str(each) for each in partition], names, stages)
    sizes = tuple(int(each) for each in partition)
    if len(sizes) != stages or min(sizes) < 1 or sum(sizes) != len(names):
        raise ValueError(
            f"partition is {list(sizes)}: give {stages} sizes of at least 1, whose sum is the {len(names)} layers"
        )
    return sizes


def _sizes_between(firsts: Sequence[str], names: Sequence[str], stages: int) -> tuple[int, ...]:
    if len(firsts) != stages - 1:
        raise ValueError(
            f"partition names {len(firsts)} layers: name the first layer of each of the {stages - 1} stages after the "
            "first"
        )
    for name in firsts:
        if name not in names:
            raise ValueError(f"partition names {name}, which is not a layer: the layers are {', '.join(names)}")
    borders = [0, *(names.index(name) for name in firsts), len(names)]
    sizes = tuple(stop - start for start, stop in pairwise(borders))
    if min(sizes) < 1:
        raise ValueError(f"partition is {list(firsts)}: the layers are called in the order {', '.join(names)}")
    return sizes


def layer_costs(costs: Costs, traced: Traced, skeleton: Skeleton) -> LayerCosts:
    """Return the costs of a model's layers.

    What comes before and after all layers counts with the first and the last layer.

    Args:
        costs: "flops" counts the FLOPs of a forward with torch's counter, on fake tensors, or parameters if that is not
            possible. "parameters" counts parameters. Otherwise a number for each layer, or the costs themselves.

    Raises:
        ValueError: ``costs`` is something else.
    """
    if costs == "flops":
        counted = flops_of_calls(traced, skeleton)
        # If nothing was counted, the model has no matrix multiplications.
        if counted is not None and any(counted):
            return _by_layer(traced, counted, skeleton.model)
    if costs in ("flops", "parameters"):
        return _by_layer(traced, [float(size_of(call.module)) for call in traced.calls.values()], skeleton.model)
    return given_costs(costs, len(traced.layers))


def given_costs(costs: Costs, layers: int) -> LayerCosts:
    """Return costs of layers from numbers. Backward takes twice as long as forward."""
    if isinstance(costs, str):
        raise ValueError(f'costs is {costs!r}: give "flops", "parameters", a number for each layer, or LayerCosts')
    if not isinstance(costs, LayerCosts):
        numbers = [float(each) for each in costs]
        scale = max(numbers, default=0.0) or 1.0
        work = tuple(number / scale for number in numbers)
        if len(work) != layers:
            raise ValueError(f"costs has {len(work)} numbers, but the model calls {layers} layers")
        return LayerCosts(layers, PipelineCosts(forward=work, input_grad=work, weight_grad=work))
    if costs.layers != layers:
        raise ValueError(f"costs are of {costs.layers} layers, but the model calls {layers}")
    return costs


def _by_layer(traced: Traced, numbers: Sequence[float], model: nn.Module) -> LayerCosts:
    """Return the costs of layers from those of the forwards of calls. A layer includes everything that is called before
    the next layer."""
    layers = len(traced.layers)
    sums = [[0.0] * layers for _ in range(3)]
    layer = -1
    for node, number, backward in zip(traced.calls, numbers, backward_of_calls(traced, model), strict=True):
        layer += node in traced.layers
        for each, share in zip(sums, (1.0, *backward), strict=True):
            each[max(layer, 0)] += share * number
    scale = max(sums[0], default=0.0) or 1.0
    forward, input_grad, weight_grad = (tuple(number / scale for number in each) for each in sums)
    return LayerCosts(layers, PipelineCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad))


def size_of(module: nn.Module) -> int:
    """Return how many parameters a module has."""
    return sum(parameter.numel() for parameter in module.parameters())
