"""What a step computes, as data: a back end may carry it out without calling Python for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..plan import Step

if TYPE_CHECKING:
    from .backend import Backend


class Slice(NamedTuple):
    """``tensor.narrow(dim, start, length)`` of a tensor that may have other strides in the next call."""

    tensor: Tensor
    dim: int
    start: int
    length: int


class Part(NamedTuple):
    """``view``, which lies at the same place in the contiguous ``tensor`` in every call."""

    tensor: Tensor
    view: Tensor


Operand = Tensor | Slice | Part
"""What is computed with: a whole tensor of the call's or of the workspace, or a part of one of the call's."""


class Multiply(NamedTuple):
    """``out = a @ b``, or ``out += a @ b``; see `Backend.multiply`."""

    a: Operand
    b: Operand
    out: Operand
    add: bool = False


class Copy(NamedTuple):
    """``out.copy_(source)``; see `Backend.copy`."""

    out: Operand
    source: Operand


class Sum(NamedTuple):
    """``out = copy = `` the sum (or mean) of ``partials``, in their order; see `Backend.sum`."""

    partials: Sequence[Operand]
    average: bool
    out: Operand
    copy: Operand | None = None


Work = Multiply | Copy | Sum

WorkOf = Callable[[Step], Sequence[Work] | None]
"""What a step computes; None where only its function in the table knows."""


def tensor_of(operand: Operand) -> Tensor:
    """An operand as a tensor."""
    if isinstance(operand, Slice):
        return operand.tensor.narrow(operand.dim, operand.start, operand.length)
    return operand.view if isinstance(operand, Part) else operand


def carry_out(backend: Backend, work: Sequence[Work]) -> None:
    """Do it here and now, one after another."""
    for each in work:
        if isinstance(each, Multiply):
            backend.multiply(tensor_of(each.a), tensor_of(each.b), tensor_of(each.out), each.add)
        elif isinstance(each, Copy):
            backend.copy(tensor_of(each.out), tensor_of(each.source))
        else:
            targets = [tensor_of(target) for target in (each.out, each.copy) if target is not None]
            backend.sum([tensor_of(partial) for partial in each.partials], each.average, *targets)
