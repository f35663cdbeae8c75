"""Empty the caches of functions, as `functools.lru_cache` makes them, that hold fake tensors.

A layer may call a function that keeps its results, such as a table of positions for each length. While a model is
traced, such a function returns fake tensors. The next real call must not get them.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

from ._torch import FakeTensor, FunctionalTensor

_Cached = type(functools.cache(lambda: None))


def empty_caches_of_fakes() -> None:
    for function in gc.get_objects():
        if type(function) is _Cached and any(_is_or_has_fake(each) for each in gc.get_referents(function)):
            function.cache_clear()


def _is_or_has_fake(value: Any, depth: int = 6) -> bool:
    """Look for fake tensors in a value, and in the tuples, lists and dicts in it; not in other objects."""
    # Not isinstance(), which asks the object itself for its class: a proxy would do something.
    if issubclass(type(value), (FakeTensor, FunctionalTensor)):
        return True
    if type(value) is dict:
        value = list(value.values())
    if not depth or not issubclass(type(value), (tuple, list)):
        return False
    return any(_is_or_has_fake(each, depth - 1) for each in value)
