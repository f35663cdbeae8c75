"""A deep copy of a model. What cannot be copied, such as a lock, the copy shares with the original."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from types import AsyncGeneratorType, GeneratorType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ._torch import tree_flatten

_OF_THE_PROCESS = (dist.ProcessGroup, DeviceMesh)
_NOT_SHARED = (nn.Module, GeneratorType, AsyncGeneratorType)  # the copy would change the original
_NOT_OF_AN_OBJECT = (MemoryError, RecursionError)
_MOST = 100  # objects of one type in one module. A `__getstate__` may create such an object anew with each call


def copied(model: nn.Module, others: Mapping[int, Any]) -> tuple[nn.Module, dict[int, Any]]:
    """Copy a model.

    Args:
        others: what takes the place of a parameter or buffer in the copy, by the ``id`` of the original.

    Returns:
        The copy, and what has been copied, by the ``id`` of the original.

    Raises:
        TypeError: a module or a generator cannot be copied, or too many objects of a module.
    """
    known = {**others, **{id(value): _instead_of(value) for value in _without_copies(model)}}
    counts: Counter[str] = Counter()
    alive: list[Any] = []  # another object must not get the `id` of one that is known
    while True:
        memo = dict(known)  # deepcopy does not copy what it finds in its memo
        try:
            return copy.deepcopy(model, memo), memo
        except _NOT_OF_AN_OBJECT:
            raise
        except Exception as error:
            where, value = _not_copied(error, model)
            counts[where] += 1
            if isinstance(value, _NOT_SHARED) or id(value) in known or counts[where] > _MOST:
                raise TypeError(
                    f"{where} cannot be copied, which tracing needs ({type(error).__name__}: {error}). Cut without "
                    "tracing (trace=False)"
                ) from error
            alive.append(value)
            known[id(value)] = _instead_of(value)


def _without_copies(model: nn.Module) -> Iterator[Any]:
    """Return what is known to have no copy. All else is found one by one, with a new copy each time."""
    for module in model.modules():
        for value in tree_flatten(list(vars(module).values()))[0]:
            # Pruning computes a tensor anew in each forward, and a model may keep results in a list.
            if isinstance(value, _OF_THE_PROCESS) or (isinstance(value, Tensor) and not value.is_leaf):
                yield value


def _instead_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _not_copied(error: BaseException, model: nn.Module) -> tuple[str, Any]:
    """Return the object that an error of deepcopy is about, and words for it and for the module that has it."""
    found: list[Any] = []
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code is copy.deepcopy.__code__:
            found.append(step.tb_frame.f_locals["x"])
        step = step.tb_next
    names = {id(module): name or "the model itself" for name, module in model.named_modules()}
    module = next(each for each in reversed(found) if id(each) in names)
    where = f"{names[id(module)]} ({type(module).__name__})"
    return where if found[-1] is module else f"a {type(found[-1]).__name__} of {where}", found[-1]
