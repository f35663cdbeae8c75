"""Empty the caches of functions, as `functools.lru_cache` makes them, of what they have kept while a model was traced.

A layer may call a function that keeps its results, such as a table of positions for each length. While a model is
traced, such a function returns fake tensors, or numbers that stand for the values of tensors. The next real call must
not get them.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from types import FunctionType, ModuleType
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor

from ._torch import FakeTensor, FunctionalTensor

_Cached = type(functools.cache(lambda: None))
_OF_A_TRACE = (FakeTensor, FunctionalTensor, SymBool, SymFloat, SymInt)
_NOT_SEARCHED = (Tensor, type, ModuleType)
_MOST = 10_000
"""How many objects are looked at for each cache."""


class FunctionCaches:
    """The caches of all functions. As a context: what they keep of a trace inside of it is gone behind it.

    After ``gc.freeze()``, the functions that were frozen are not found.
    """

    def __init__(self) -> None:
        self._known = {function: function.cache_info().misses for function in _functions()}

    def __enter__(self) -> FunctionCaches:
        return self

    def __exit__(self, *error: object) -> None:
        self._known = {**dict.fromkeys(_functions(), 0), **self._known}  # also new ones
        self.empty()

    def empty(self) -> None:
        """Empty those that have kept something of a trace since the last call."""
        for function, misses in self._known.items():
            info = function.cache_info()
            if info.misses == misses:
                continue
            if info.currsize and _has_something_of_a_trace(function):
                function.cache_clear()
            self._known[function] = function.cache_info().misses


def _functions() -> list[Any]:
    # Not gc.get_objects(): it also returns tuples that other threads are filling, and then they cannot go on.
    return [found for found in gc.get_referrers(_Cached) if type(found) is _Cached]


def _has_something_of_a_trace(function: Any) -> bool:
    """Look through what a cache holds, and through what that consists of."""
    waiting, seen = deque(gc.get_referents(function)), {id(function), id(getattr(function, "__wrapped__", None))}
    while waiting and len(seen) < _MOST:
        value = waiting.popleft()
        # Not isinstance(), which asks the object itself for its class: a proxy would do something.
        if issubclass(type(value), _OF_A_TRACE):
            return True
        if id(value) in seen or issubclass(type(value), _NOT_SEARCHED):
            continue
        seen.add(id(value))
        if issubclass(type(value), FunctionType):  # not its globals
            waiting += [value.__closure__, value.__defaults__, value.__kwdefaults__]
        else:
            waiting += gc.get_referents(value)
    return False
