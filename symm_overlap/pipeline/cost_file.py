"""Read the costs of a model from TOML::

    layers = 32               # the numbers below are per layer: one for all layers, or a list with one for each
    forward = 1.0
    input_grad = 1.0
    weight_grad = 0.8
    activation = 34.0         # memory of one microbatch, in any unit; a memory cap has the same unit
    kept = 12.0               # how much of that is still kept between the two halves of a split backward
    message = 0.2             # size of a layer's output; sending it takes message / bandwidth
    bandwidth = 1.0
    latency = 0.01

    [first]                   # added to the first layer: an embedding
    forward = 0.1

    [last]                    # added to the last layer: the head and the loss
    forward = 2.5
    input_grad = 2.5
    weight_grad = 2.5

The keys are the attributes of `PipelineCosts`. ``layers`` can be left out if some cost is a list with one number for
each layer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from .layer_costs import LayerCosts
from .simulation.costs import OF_PIPELINE, PipelineCosts

_ALL = tuple(field.name for field in fields(PipelineCosts))
_OF_LAYER = tuple(name for name in _ALL if name not in OF_PIPELINE)


def read_costs(text: str) -> LayerCosts:
    """Return the costs that a TOML text describes.

    Raises:
        ValueError: the text is not TOML, has an unknown key, or has a number that is not allowed. The message names the
            key.
    """
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table: dict[str, Any] = toml.loads(text)
    except (toml.TOMLDecodeError, RecursionError) as error:  # the second one is for lists that are nested too deeply
        raise ValueError(f"the costs are not TOML: {error}") from error
    ends = {name: table.pop(name) for name in ("first", "last") if name in table}
    given = table.pop("layers", None)
    values = {name: _value(name, value) for name, value in table.items() if _known(name, _ALL)}
    layers = given if given is not None else _length(values)
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ValueError(f"layers is {layers!r}: give how many layers the model has, such as layers = 32")
    costs = LayerCosts(layers, PipelineCosts(**values))
    for name, index in (("first", 0), ("last", layers - 1)):
        if name in ends:
            costs = _with_added(costs, name, ends[name], index)
    return costs


def _known(name: str, names: tuple[str, ...], where: str = "") -> bool:
    if name not in names:
        raise ValueError(f"there is no cost {where}{name}: the costs are {', '.join(names)}")
    return True


def _value(name: str, value: object) -> Any:
    """Check the type of a value and convert it. `PipelineCosts` checks its sign, and `LayerCosts` its length."""
    if name == "one_receive_stream":
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}: give true or false")
        return value
    numbers: list[Any] = value if isinstance(value, list) and name in _OF_LAYER else [value]
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
        what = "a number, or a list with one for each layer" if name in _OF_LAYER else "a number"
        raise ValueError(f"{name} is {value!r}: give {what}")
    try:
        return tuple(map(float, numbers)) if isinstance(value, list) else float(numbers[0])
    except OverflowError as error:
        raise ValueError(f"{name} has a number that is too large: costs are finite numbers") from error


def _length(values: Mapping[str, Any]) -> int:
    """Return the number of layers, which is the length of the first list."""
    for value in values.values():
        if isinstance(value, tuple):
            return len(value)
    raise ValueError("the costs do not say how many layers the model has: give layers = 32, or one number for each")


def _with_added(costs: LayerCosts, where: str, added: object, index: int) -> LayerCosts:
    """Return the costs after those of an embedding or a head were added to one layer."""
    if not isinstance(added, dict):
        raise ValueError(f"{where} is {added!r}: it is a table of costs, under a line [{where}]")
    changed: dict[str, Any] = {name: getattr(costs.costs, name) for name in _ALL}
    for name, value in added.items():
        _known(name, _OF_LAYER, f"{where}.")
        number = _value(f"{where}.{name}", value)
        PipelineCosts(**{name: number})  # checks this cost on its own, before it is added to another
        if changed[name] is None:
            raise ValueError(f"[{where}] adds to {name}, which follows from other costs: give {name} of all layers too")
        each = costs.costs.each(name, costs.layers)
        each[index] += number
        changed[name] = tuple(each)
    return LayerCosts(costs.layers, PipelineCosts(**changed))
