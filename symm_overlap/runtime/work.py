"""What a step computes, as data: a back end may carry it out without calling Python for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from .. import _C
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

Issued = tuple[object, ...]
"""The name of a member of `_C.Program`, and its arguments behind the stream."""


class Places(Protocol):
    """Where a program finds what is computed with."""

    def operand(self, operand: Operand) -> _C.Operand:
        """Where an operand lies in every call."""

    def optional(self, operand: Operand | None) -> _C.Operand | None:
        """The same, or None for None."""

    def made(self, tensor: Tensor) -> int:
        """The index of memory that is made anew in every call."""


class Make(NamedTuple):
    """``tensor`` is memory for a result in between, which only this step knows: in every call it is made anew."""

    tensor: Tensor

    def run(self, backend: Backend) -> None:
        """It is there."""

    def issued(self, places: Places) -> Issued:
        """See `Work`."""
        return "make", places.made(self.tensor), self.tensor


class Multiply(NamedTuple):
    """``out = a @ b``, or ``out += a @ b``; see `Backend.multiply`."""

    a: Operand
    b: Operand
    out: Operand
    add: bool = False

    def run(self, backend: Backend) -> None:
        """See `Work`."""
        backend.multiply(tensor_of(self.a), tensor_of(self.b), tensor_of(self.out), self.add)

    def issued(self, places: Places) -> Issued:
        """See `Work`."""
        return "multiply", *map(places.operand, self[:3]), self.add


class MultiplyScaled(NamedTuple):
    """``out = a @ b``, of float8 matrices, with scales; the names are those of ``torch._scaled_mm``.

    Scales are numbers without a dimension, or (rows, 1) and (1, columns). In float32 it can be made where torch has no
    float8 matmul.
    """

    a: Operand
    scale_a: Operand
    b: Operand
    scale_b: Operand
    bias: Operand | None
    result_scale: Operand | None
    fast: bool
    in_float32: bool
    out: Operand

    def run(self, backend: Backend) -> None:
        """See `Work`."""
        a, scale_a, b, scale_b = (tensor_of(each) for each in (self.a, self.scale_a, self.b, self.scale_b))
        bias, result_scale = (None if each is None else tensor_of(each) for each in (self.bias, self.result_scale))
        out = tensor_of(self.out)
        _C.multiply_scaled(a, scale_a, b, scale_b, bias, result_scale, self.fast, self.in_float32, out)

    def issued(self, places: Places) -> Issued:
        """See `Work`."""
        return "multiply_scaled", *map(places.optional, self[:6]), self.fast, self.in_float32, places.operand(self.out)


class Add(NamedTuple):
    """``out += addend``, rounded."""

    out: Operand
    addend: Operand

    def run(self, backend: Backend) -> None:
        """See `Work`."""
        tensor_of(self.out).add_(tensor_of(self.addend))

    def issued(self, places: Places) -> Issued:
        """See `Work`."""
        return "add", *map(places.operand, self)


class Copy(NamedTuple):
    """``out.copy_(source)``; see `Backend.copy`."""

    out: Operand
    source: Operand

    def run(self, backend: Backend) -> None:
        """See `Work`."""
        backend.copy(tensor_of(self.out), tensor_of(self.source))

    def issued(self, places: Places) -> Issued:
        """See `Work`."""
        return "copy_tensor", *map(places.operand, self)


class Sum(NamedTuple):
    """``out = copy = `` the sum (or mean) of ``partials``, in their order; see `Backend.sum`."""

    partials: Sequence[Operand]
    average: bool
    out: Operand
    copy: Operand | None = None

    def run(self, backend: Backend) -> None:
        """See `Work`."""
        targets = [tensor_of(target) for target in (self.out, self.copy) if target is not None]
        backend.sum([tensor_of(partial) for partial in self.partials], self.average, *targets)

    def issued(self, places: Places) -> Issued:
        """See `Work`."""
        partials = [places.operand(partial) for partial in self.partials]
        return "sum", partials, self.average, places.operand(self.out), places.optional(self.copy)


class Work(Protocol):
    """One of the records above."""

    def run(self, backend: Backend) -> None:
        """Do it here and now."""

    def issued(self, places: Places) -> Issued:
        """How a program is told to do it."""


WorkOf = Callable[[Step], Sequence[Work] | None]
"""What a step computes; None where only its function in the table knows."""


def tensor_of(operand: Operand) -> Tensor:
    """An operand as a tensor."""
    if isinstance(operand, Slice):
        return operand.tensor.narrow(operand.dim, operand.start, operand.length)
    return operand.view if isinstance(operand, Part) else operand


def view_of(operand: Tensor | Part, view: Callable[[Tensor], Tensor]) -> Part:
    """A view of an operand; one of a whole tensor has to be contiguous."""
    return Part(operand.tensor if isinstance(operand, Part) else operand, view(tensor_of(operand)))


def carry_out(backend: Backend, work: Sequence[Work]) -> None:
    """Do it here and now, one after another."""
    for each in work:
        each.run(backend)
