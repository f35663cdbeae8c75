"""The state of modules beside the graph: their attributes. Code between layers that changes it cannot be traced.

The tracer runs this code once, on a copy of the model. When the stages run, its changes are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from .trace_error import PassedError

_OF_TORCH = frozenset(vars(nn.Module()))
_SIMPLE = (bool, int, float, str)


class State:
    """Notes the attributes and buffers of modules while a model is traced.

    Whole modules may change their own, since they are called when the stages run. The modules around them may only fill
    attributes that are missing or None, such as caches.

    Args:
        model: the model.
        whole: its whole modules by name.

    Attributes:
        around: the modules around the whole modules, by name.
    """

    def __init__(self, model: nn.Module, whole: Mapping[str, nn.Module]) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._whole = whole
        inside = {inner for module in whole.values() for inner in module.modules()}
        self.around = {name: module for module, name in self._names.items() if module not in inside}
        self._known: dict[nn.Module, dict[str, Any]] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Check the model's own code, which runs inside, and undo what it sets, so that it runs alike the next time.

        Raises:
            PassedError: it has changed an attribute.
        """
        self._known = {module: _attributes(module) for module in self._names}
        try:
            yield
            self._require_same_in_the_end()
        finally:
            for module in self.around.values():
                own, known = vars(module), self._known[module]
                for name in own.keys() - _OF_TORCH - known.keys():
                    del own[name]
                own.update((name, value) for name, value in known.items() if name in own)

    def note(self, whole: nn.Module) -> None:
        """Note the state of a whole module after a call."""
        self._known.update((inner, _attributes(inner)) for inner in whole.modules())

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

    def _require_same_in_the_end(self) -> None:
        for module in self._whole.values():
            self.require_same(module)
        for module in self.around.values():
            for name in self._changed(module):
                if self._known[module].get(name) is not None:
                    raise PassedError(
                        f"the model sets {self._full(module, name)} in its forward, and the stages would use the old "
                        "value: change a buffer in place (add_, copy_), or move this into a module that has no layers "
                        "inside"
                    )

    def _changed(self, module: nn.Module) -> list[str]:
        known = self._known[module]
        return [key for key, value in _attributes(module).items() if key not in known or not _same(known[key], value)]

    def _full(self, module: nn.Module, name: str) -> str:
        return f"{self._names[module]}.{name}".lstrip(".")


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
    return {**own, **module._buffers}


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _SIMPLE) and isinstance(other, _SIMPLE) and one == other)
