"""Call an op's kernel directly, without torch's dispatcher, which accounts for a fifth of the time of a small call.

A call is made directly only if the dispatcher would do nothing except call that kernel. A call of the same kind must
also have passed through the dispatcher before, unchanged, with every argument of exactly the type in the schema. Then
the dispatcher would neither reject this call nor convert an argument, for example a tensor to a number. The dispatcher
is not consulted again. If somebody later overrides an op's kernel with `torch.library`, the new kernel is therefore not
used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import _C

KERNELS: dict[Any, Callable[..., Any]] = {}
"""For each overload of an op, the function that carries it out on a device. It has the arguments of the overload."""

MOST_KNOWN = 4096
"""How many kinds of calls are remembered. If a program makes more, the cache is cleared."""

_passed: set[tuple[Any, bytes]] = set()  # kinds of calls that the dispatcher has passed on unchanged


def call(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``op(*args, **kwargs)``, for a caller that has left the autograd layer. Tensors must be among ``args``."""
    if not _C.dispatches_to_kernel_only(args):
        return op(*args, **kwargs)
    try:
        key = op, _C.argument_key((args, *kwargs.items()) if kwargs else args)
    except TypeError:  # arguments that only the dispatcher can handle
        return op(*args, **kwargs)
    if key in _passed:
        return KERNELS[op](*args, **kwargs)
    result = op(*args, **kwargs)
    if op in KERNELS and _unchanged(op, args, kwargs):
        if len(_passed) >= MOST_KNOWN:
            _passed.clear()
        _passed.add(key)
    return result


def _unchanged(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if the dispatcher passes these arguments on unchanged."""
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
"""The types of an argument that the dispatcher passes on unchanged, by the kind of its type in the schema."""
