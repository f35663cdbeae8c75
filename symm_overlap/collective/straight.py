"""Calls that go straight to the kernel of an op, past torch's dispatcher: it takes a fifth of the time of a small one.

Only those for which the dispatcher would do nothing but call that kernel, and of which it has let one pass before: with
arguments of the same types, it would not reject this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import _C

KERNELS: dict[Any, Callable[..., Any]] = {}
"""What each overload of an op does on a device, called as the overload is."""

MOST_KNOWN = 4096
"""Sorts of calls; a program that makes more begins anew."""

_passed: set[tuple[Any, bytes]] = set()  # the dispatcher


def call(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``op(*args, **kwargs)``, for a caller who has left the autograd layer out."""
    if not _C.nothing_before_kernel(args):
        return op(*args, **kwargs)
    try:
        sort = op, _C.likeness((args, *kwargs.items()) if kwargs else args)
    except TypeError:  # arguments that only the dispatcher knows what to do with
        return op(*args, **kwargs)
    if sort in _passed:
        return KERNELS[op](*args, **kwargs)
    result = op(*args, **kwargs)
    if op in KERNELS:
        if len(_passed) >= MOST_KNOWN:
            _passed.clear()
        _passed.add(sort)
    return result
