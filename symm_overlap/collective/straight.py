"""Calls that go straight to the kernel of an op, past torch's dispatcher: it takes a fifth of the time of a small one.

Only those for which the dispatcher would do nothing but call that kernel, and of which it has let one pass before as it
was, with every argument of the very type that the schema asks for: then it would neither reject this one nor convert
anything, as it makes a number of a tensor. It is not asked again, so a kernel that somebody puts over an op's own one
later, by `torch.library`, is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import _C

KERNELS: dict[Any, Callable[..., Any]] = {}
"""What each overload of an op does on a device, called as the overload is."""

MOST_KNOWN = 4096
"""Sorts of calls; a program that makes more begins anew."""

_passed: set[tuple[Any, bytes]] = set()  # sorts of calls that the dispatcher has let pass as they were


def call(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``op(*args, **kwargs)``, for a caller who has left the autograd layer out. Tensors are among ``args``."""
    if not _C.nothing_before_kernel(args):
        return op(*args, **kwargs)
    try:
        sort = op, _C.likeness((args, *kwargs.items()) if kwargs else args)
    except TypeError:  # arguments that only the dispatcher knows what to do with
        return op(*args, **kwargs)
    if sort in _passed:
        return KERNELS[op](*args, **kwargs)
    result = op(*args, **kwargs)
    if op in KERNELS and _unchanged(op, args, kwargs):
        if len(_passed) >= MOST_KNOWN:
            _passed.clear()
        _passed.add(sort)
    return result


def _unchanged(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the dispatcher hands these arguments on as they are."""
    schema = op._schema.arguments
    named = {argument.name: argument.real_type for argument in schema}
    types = [argument.real_type for argument in schema[: len(args)]] + [named[name] for name in kwargs]
    return all(_is_of(wanted, value) for wanted, value in zip(types, (*args, *kwargs.values()), strict=True))


def _is_of(wanted: Any, value: Any) -> bool:
    kind = wanted.kind()
    if kind == "OptionalType":
        return value is None or _is_of(wanted.getElementType(), value)
    if kind == "ListType":
        return isinstance(value, list) and all(_is_of(wanted.getElementType(), each) for each in value)
    return type(value) in _TYPES.get(kind, ())


_TYPES: dict[str, tuple[type, ...]] = {
    "TensorType": (torch.Tensor, torch.nn.Parameter),
    "IntType": (int,),
    "SymIntType": (int,),
    "BoolType": (bool,),
    "StringType": (str,),
    "ScalarTypeType": (torch.dtype,),
}
"""Of an argument that the dispatcher hands on as it is, by the kind of its type in a schema."""
