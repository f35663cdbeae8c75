"""Functions that a model has stored and that refer to its modules, such as ``self.head = lambda x: self.norm(x)``.

``copy.deepcopy`` does not copy functions, so those of the copy would go on using the modules of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def rebind(model: nn.Module, copies: Mapping[int, Any]) -> None:
    """Make the functions that the modules of a copied model have stored refer to the copy.

    Functions are found among the attributes and hooks of the modules, also in lists, tuples, dicts, partial functions,
    bound methods, and the closures of other functions.

    Args:
        model: the copy.
        copies: what has been copied, by the ``id`` of the original, as in the memo of ``deepcopy``.
    """
    moved = _Moved(copies)
    for module in model.modules():
        moved.within(vars(module))


class _Moved:
    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._known: dict[int, tuple[FunctionType, FunctionType]] = {}  # with the original, whose id stays its own
        self._seen: dict[int, Any] = {}

    def within(self, values: dict[Any, Any] | list[Any]) -> None:
        """Replace the functions in a list or a dict of the copy."""
        if id(values) in self._seen:
            return
        self._seen[id(values)] = values
        for place, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
            new = self._of_copy(value)
            if new is not value:
                values[place] = new

    def _of_copy(self, value: Any) -> Any:
        """Return a value of the copy with its functions replaced."""
        if isinstance(value, (dict, list)):
            self.within(value)
        elif type(value) is tuple:
            items = [self._of_copy(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else tuple(items)
        elif type(value) is partial:
            function = self._of_copy(value.func)
            if function is not value.func:
                return partial(function, *value.args, **value.keywords)
        elif isinstance(value, MethodType):
            bound = self._function(value.__func__)
            return value if bound is value.__func__ else MethodType(bound, value.__self__)
        elif isinstance(value, FunctionType):
            return self._function(value)
        return value

    def _function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that refers to the copy; the function itself if it does not refer to the model."""
        if not isinstance(function, FunctionType) or not self._refers(function, set()):
            return function
        if id(function) in self._known:
            return self._known[id(function)][1]
        cells = tuple(CellType() for _ in function.__closure__ or ())
        defaults = function.__defaults__ and tuple(map(self._given, function.__defaults__))
        new = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
        self._known[id(function)] = function, new
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            if (content := _content(old)) is not _EMPTY:
                cell.cell_contents = self._given(content)
        keywords = function.__kwdefaults__
        new.__kwdefaults__ = keywords and {name: self._given(value) for name, value in keywords.items()}
        new.__dict__.update(function.__dict__)
        new.__qualname__, new.__module__, new.__doc__ = function.__qualname__, function.__module__, function.__doc__
        return new

    def _given(self, value: Any) -> Any:
        """Return the copy of a value that a function of the original refers to."""
        found = self._copies.get(id(value), value)
        return self._function(value) if found is value and isinstance(value, FunctionType) else found

    def _refers(self, function: FunctionType, known: set[int]) -> bool:
        """True if a function refers to something that has been copied."""
        if id(function) in known:
            return False
        known.add(id(function))
        values = [content for cell in function.__closure__ or () if (content := _content(cell)) is not _EMPTY]
        values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return any(
            self._refers(value, known) if isinstance(value, FunctionType) else self._is_copied(value)
            for value in values
        )

    def _is_copied(self, value: Any) -> bool:
        return self._copies.get(id(value), value) is not value


_EMPTY = object()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value
        return _EMPTY
