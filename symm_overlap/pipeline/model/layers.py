"""Find the layers of a model, and the modules that are called as they are.

A pipeline is cut only between layers. A module is *whole* if it is a layer, or if it contains no layer but its parent
does. A whole module is called as a module, and the code inside it is not analysed. What remains are the modules around
the layers (the model itself, the list of its layers), whose ``forward`` determines the order in which whole modules are
called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

Classes = type | str | tuple[type | str, ...]


def layers_of(
    model: nn.Module, layer_cls: Classes | None = None, layer_names: str | Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the names of a model's layers, in the order in which they are registered.

    Args:
        layer_cls: selects the outermost modules of one of these classes, or of a class with one of these names.
        layer_names: selects the modules with these names. ``*`` matches anything but a dot: ``"blocks.*"``.

        With neither, the layers are the children of the ``ModuleList`` or ``Sequential`` with the most parameters.

    Raises:
        ValueError: both are given, there is no such module, or a layer would be inside another one.
    """
    if layer_cls is not None and layer_names is not None:
        raise ValueError("give layer_cls or layer_names, not both")
    if layer_cls is not None:
        return _of_class(model, layer_cls)
    if layer_names is not None:
        return _of_names(model, [layer_names] if isinstance(layer_names, str) else layer_names)
    return _largest_list(model)


def _of_class(model: nn.Module, layer_cls: Classes) -> tuple[str, ...]:
    classes = layer_cls if isinstance(layer_cls, tuple) else (layer_cls,)
    types = tuple(each for each in classes if isinstance(each, type))
    names = {each for each in classes if isinstance(each, str)}
    found: list[str] = []
    for name, module in model.named_modules():
        fits = isinstance(module, types) or type(module).__name__ in names
        if fits and name and not any(is_inside(name, other) for other in found):
            found.append(name)
    if not found:
        wanted = ", ".join(each if isinstance(each, str) else each.__name__ for each in classes)
        there = sorted({type(module).__name__ for name, module in model.named_modules() if name})
        raise ValueError(f"{type(model).__name__} has no module of {wanted}: its modules are of {', '.join(there)}")
    return tuple(found)


def _of_names(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    names = [name for name, _ in model.named_modules() if name]
    found: set[str] = set()
    for pattern in patterns:
        fitting = names_that_fit(pattern, names)
        if not fitting:
            near = get_close_matches(pattern, names, 3)
            hint = f": is it {' or '.join(near)}?" if near else f": it has {', '.join(names[:20])}"
            raise ValueError(f"{type(model).__name__} has no module {pattern!r}{hint}")
        found.update(fitting)
    for name in found:
        for other in found:
            if name != other and is_inside(name, other):
                raise ValueError(
                    f"layer {name} is inside layer {other}: a layer is never cut, so name only one of them"
                )
    return tuple(name for name in names if name in found)


def _largest_list(model: nn.Module) -> tuple[str, ...]:
    """Return the children of the module list with the most parameters; among equals, with the most children."""
    best, layers = (0, 1), tuple[str, ...]()
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            size = sum(parameter.numel() for parameter in module.parameters()), len(module)
            if size[1] > 1 and size > best:
                best, layers = size, tuple(f"{name}.{child}" if name else child for child, _ in module.named_children())
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList or Sequential of several modules with parameters, so its layers "
            "cannot be found: give layer_cls or layer_names"
        )
    return layers


def names_that_fit(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that match a pattern, in which ``*`` matches anything but a dot."""
    parts = pattern.split(".")
    return [
        name
        for name in names
        if name.count(".") == pattern.count(".")
        and all(fnmatchcase(part, wanted) for part, wanted in zip(name.split("."), parts, strict=True))
    ]


def is_inside(name: str, other: str) -> bool:
    """True if a module is inside another one, or is it."""
    return name == other or name.startswith(f"{other}.")


def whole_modules(model: nn.Module, layers: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that are called as they are, by name: see the top of this file."""
    parts = [layer.split(".") for layer in layers]
    around = {".".join(names[:end]) for names in parts for end in range(len(names))}
    return {
        name: module
        for name, module in model.named_modules()
        if name not in around and name.rpartition(".")[0] in around
    }
