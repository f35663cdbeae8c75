"""What a step computes, as data: a back end may carry it out without calling Python for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..plan import Step

if TYPE_CHECKING:
    from .backend import Backend


class Multiply(NamedTuple):
    """``out = a @ b``, or ``out += a @ b``; see `Backend.multiply`."""

    a: Tensor
    b: Tensor
    out: Tensor
    add: bool = False


class Copy(NamedTuple):
    """``out.copy_(source)``; see `Backend.copy`."""

    out: Tensor
    source: Tensor


class Sum(NamedTuple):
    """``out = `` the sum (or mean) of ``partials``, in their order; see `Backend.sum`."""

    partials: list[Tensor]
    out: Tensor
    average: bool


Work = Multiply | Copy | Sum

WorkOf = Callable[[Step], Sequence[Work] | None]
"""What a step computes; None where only its function in the table knows."""


def carry_out(backend: Backend, work: Sequence[Work]) -> None:
    """Do it here and now, one after another."""
    for each in work:
        if isinstance(each, Multiply):
            backend.multiply(*each)
        elif isinstance(each, Copy):
            backend.copy(*each)
        else:
            backend.sum(each.partials, each.average, each.out)
