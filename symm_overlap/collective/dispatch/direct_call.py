"""Call an op's kernel directly, without torch's dispatcher, which accounts for a fifth of the time of a small call.

A call is made directly only if the dispatcher and its autograd layer would do nothing except call that kernel
(`_C.kernel_key`), with arguments that it passes on unchanged because each is exactly of the type in the schema. So the
dispatcher is not asked. If somebody overrides an op's kernel with `torch.library`, the new kernel is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

KERNELS: dict[Any, Callable[..., Any]] = {}
"""For each overload of an op, the function that carries it out on a device. It has the arguments of the overload, and
``key``: see `call`."""

MOST_KNOWN = 4096
"""How many kinds of calls are remembered. If a program makes more, the cache is cleared."""

_unchanged: dict[tuple[int, bytes], bool] = {}  # for kinds of calls, whether the dispatcher passes arguments unchanged


def call(op: Any, key: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``op(*args, **kwargs)``, for a caller that has left the autograd layer.

    Args:
        key: the `kernel_key` of the arguments.
    """
    kind = id(op), key
    unchanged = _unchanged.get(kind)
    if unchanged is None:
        if len(_unchanged) >= MOST_KNOWN:
            _unchanged.clear()
        unchanged = _unchanged[kind] = op in KERNELS and _passed_on(op, args, kwargs)
    return KERNELS[op](*args, key=key, **kwargs) if unchanged else op(*args, **kwargs)


def _passed_on(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
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
