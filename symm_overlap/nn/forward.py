"""Replace the forward of an existing module."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn


def override(module: Any, forward: Callable[..., Any], **attributes: Any) -> None:
    """Set ``forward(module, ...)`` as the module's forward, and set ``attributes`` on the module.

    The module keeps its class and its hooks. The new forward is a bound method, so ``copy.deepcopy`` binds it to the
    copy. A bound method is saved as its name, under which no module has it when it is loaded, so saving the whole
    module raises an error.
    """
    for name, value in attributes.items():
        setattr(module, name, value)
    module.forward = MethodType(forward, module)
    module.not_saved = _NOT_SAVED


def not_saved(self: object) -> NoReturn:
    """Raise an error when a module with a style is saved as a whole. Otherwise loading it would fail."""
    raise TypeError("a module with a style of symm_overlap.nn cannot be saved as a whole: save its state_dict()")


class _NotSaved:
    """Raises an error when the module that it is an attribute of is saved."""

    def __deepcopy__(self, memo: Any) -> _NotSaved:
        return self

    __reduce__ = not_saved


_NOT_SAVED = _NotSaved()
