"""Parameters that several stages share, such as GPT-2's embedding, which is also the weight of its last layer."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import nn

Tied = tuple[tuple[tuple[int, str], ...], ...]


def names_of_part(part_modules: Sequence[str], attributes: Sequence[str], model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a stage by their names in the whole model. A tied parameter has several names."""
    found: dict[str, nn.Parameter] = {}
    for name in part_modules:
        inside = model.get_submodule(name).named_parameters(remove_duplicate=False)
        found.update({f"{name}.{own}" if name else own: parameter for own, parameter in inside})
    for name in attributes:
        value = operator.attrgetter(name)(model)
        if isinstance(value, nn.Parameter):
            found[name] = value
    return found


def tied(stages: Sequence[dict[str, nn.Parameter]]) -> Tied:
    """Return for each parameter that several stages have: the stages, and its name in each.

    Args:
        stages: the parameters of each stage by name. Tied parameters are the same object.
    """
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, parameters in enumerate(stages):
        for name, parameter in parameters.items():
            known = places.setdefault(id(parameter), [])
            if stage not in [other for other, _ in known]:
                known.append((stage, name))
    return tuple(tuple(known) for known in places.values() if len(known) > 1)


def all_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return for the name of every tied parameter or buffer in the state dict of a model all its names."""
    names: dict[int, list[str]] = {}
    values = model.state_dict(keep_vars=True)
    for name, value in values.items():
        names.setdefault(id(value), []).append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}
