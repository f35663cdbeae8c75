"""The state of modules beside the graph: their attributes, parameters and buffers. Code between layers that changes it
cannot be traced.

The tracer runs this code once, on a copy of the model. When the stages run, its changes are missing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from .draws import Draws
from .error import PassedError

_OF_TORCH = frozenset(vars(nn.Module()))
_SIMPLE = (bool, int, float, str)


class State:
    """Notes the attributes, parameters and buffers of modules while a model is traced.

    Whole modules may change their own, since they are called when the stages run. The modules around them may only fill
    attributes that are missing or None, such as caches.

    Args:
        whole: the names of whole modules.

    Attributes:
        filled: the names of the attributes that the modules around the whole modules have filled.
        draws: the random numbers that are drawn.
    """

    def __init__(self, whole: Collection[str]) -> None:
        self._whole = whole
        self._names: dict[str, nn.Module] = {}
        self._around: list[nn.Module] = []
        self._known: dict[int, dict[str, Any]] = {}
        self.filled: set[str] = set()
        self.draws = Draws()

    def begin(self, model: nn.Module) -> None:
        """Note the state before the model is called."""
        self._names = dict(model.named_modules())
        self._around = list(modules_around(model, self._whole).values())
        self._known = {_identity(module): _attributes(module) for module in self._names.values()}
        self.draws.begin()

    def note(self, whole: nn.Module) -> None:
        """Note the state of a whole module after a call."""
        self._known.update((_identity(inner), _attributes(inner)) for inner in whole.modules())

    def require_same(self, whole: nn.Module) -> None:
        """Check that the model has not changed a whole module since it was noted.

        Raises:
            PassedError: it has.
        """
        for inner in whole.modules():
            for name in self._changed(inner):
                raise PassedError(
                    f"the model sets {self._full(inner, name)}, an attribute inside a layer or another module that it "
                    "calls, where the stages would not set it: pass the value as an argument"
                )

    def end(self) -> None:
        """Check all modules after the model was called.

        Raises:
            PassedError: the model has changed one.
        """
        self.draws.end()
        for name, module in self._names.items():
            if name in self._whole:
                self.require_same(module)
        for module in self._around:
            for name in self._changed(module):
                known, full = self._known[_identity(module)].get(name), self._full(module, name)
                if known is None:
                    self.filled.add(full)
                    continue
                verb = "changes" if isinstance(known, _Contents) else "sets"
                raise PassedError(
                    f"the model {verb} {full} in its forward, and the stages would use the old value: change a buffer "
                    "in place (add_, copy_), or move this into a module that has no layers inside"
                )

    def undo(self) -> None:
        """Undo what the model has set on modules around the whole modules, so that it runs alike the next time."""
        self.draws.undo()
        for module in self._around:
            own, known = vars(module), self._known[_identity(module)]
            for name in own.keys() - _OF_TORCH - known.keys():
                del own[name]
            for name in own.keys() & known.keys():
                own[name] = known[name].restored() if isinstance(known[name], _Contents) else known[name]
            for registered in (module._parameters, module._buffers):
                for name in list(registered):
                    if name in known:
                        registered[name] = known[name]
                    else:
                        del registered[name]

    def _changed(self, module: nn.Module) -> list[str]:
        known = self._known[_identity(module)]
        return [key for key, value in _attributes(module).items() if key not in known or not _same(known[key], value)]

    def _full(self, module: nn.Module, name: str) -> str:
        owner = next(full for full, known in self._names.items() if _identity(known) == _identity(module))
        return f"{owner}.{name}".lstrip(".")


def modules_around(model: nn.Module, whole: Collection[str]) -> dict[str, nn.Module]:
    """Return the modules that are not inside whole modules, by name."""
    inside = {inner for name in whole for inner in model.get_submodule(name).modules()}
    return {name: module for name, module in model.named_modules() if module not in inside}


def _identity(module: nn.Module) -> int:
    """Return a key for a module. While torch traces, it calls objects that stand for modules and share their state,
    if a module has several names."""
    return id(vars(module))


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
    lists = {name: _Contents(value) for name, value in own.items() if isinstance(value, (list, dict))}
    return {**own, **lists, **module._parameters, **module._buffers}


class _Contents:
    """What a list or dict of a module has in it."""

    def __init__(self, value: list[Any] | dict[Any, Any]) -> None:
        self.value, self._copy = value, value.copy()

    def same(self, other: _Contents) -> bool:
        """True if both are of the same list or dict, with the same contents."""
        one, two = self._copy, other._copy
        if self.value is not other.value or len(one) != len(two):
            return False
        if isinstance(one, dict):
            return all(key in two and _same(value, two[key]) for key, value in one.items())
        return all(map(_same, one, two))

    def restored(self) -> list[Any] | dict[Any, Any]:
        """Return the list or dict, with these contents again. One that has them is left alone: it may be frozen."""
        if self.same(_Contents(self.value)):
            return self.value
        self.value.clear()
        if isinstance(self.value, dict):
            self.value.update(self._copy)
        else:
            self.value.extend(self._copy)
        return self.value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, _Contents) and isinstance(other, _Contents):
        return one.same(other)
    return one is other or (isinstance(one, _SIMPLE) and isinstance(other, _SIMPLE) and one == other)
