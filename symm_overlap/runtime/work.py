"""What a step computes, described as data, so that a back end can carry it out without calling Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
    """``view``, a view of the contiguous ``tensor``. It is at the same place in the tensor in every call."""

    tensor: Tensor
    view: Tensor


class Fixed(NamedTuple):
    """``tensor`` is not a tensor of the call, but it is at the same address in every call of the same variant."""

    tensor: Tensor


Operand = Tensor | Slice | Part | Fixed
"""An operand of a computation: a whole tensor of the call or of the workspace, a part of a tensor of the call, or
memory of a peer that stays where it is.
"""

Issued = tuple[object, ...]
"""The name of a method of `_C.Program`, and its arguments after the stream."""


class Places(Protocol):
    """Translates operands to the places where a program finds them in every call."""

    def operand(self, operand: Operand) -> _C.Operand:
        """Return where to find an operand in every call."""

    def optional(self, operand: Operand | None) -> _C.Operand | None:
        """Return the same for an operand, or None for None."""

    def made(self, tensor: Tensor) -> int:
        """Return the index of memory that is allocated anew in every call."""

    def keep(self, used: object) -> None:
        """Keep an object that the program uses as long as the program."""


class Make(NamedTuple):
    """``tensor`` is memory for an intermediate result that only this step uses. It is allocated anew in every call."""

    tensor: Tensor

    def run(self, backend: Backend) -> None:
        """Do nothing: ``tensor`` is already allocated."""

    def issued(self, places: Places) -> Issued:
        """See `Work`."""
        return "make", places.made(self.tensor), self.tensor


class Multiply(NamedTuple):
    """``out = a @ b + bias``, or ``out += a @ b + bias``; see `Backend.multiply`."""

    a: Operand
    b: Operand
    out: Operand
    add: bool = False
    bias: Operand | None = None

    def run(self, backend: Backend) -> None:
        """See `Work`."""
        bias = None if self.bias is None else tensor_of(self.bias)
        backend.multiply(tensor_of(self.a), tensor_of(self.b), tensor_of(self.out), self.add, bias)

    def issued(self, places: Places) -> Issued:
        """See `Work`."""
        return "multiply", *map(places.operand, self[:3]), self.add, places.optional(self.bias)


class MultiplyScaled(NamedTuple):
    """``out = a @ b`` for float8 matrices with scales. The names are those of ``torch._scaled_mm``.

    A scale is one number without a dimension, or has shape (rows, 1) for ``a`` and (1, columns) for ``b``. With
    ``in_float32``, the product is computed in float32, for devices on which torch has no float8 matmul.
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
    """Write the sum (or mean) of ``partials``, in their order, to ``out`` and ``copy``; see `Backend.sum`."""

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


class RaiseFlag(NamedTuple):
    """Set the flag of a chunk; see csrc/issue/flags.h."""

    flags: _C.Flags
    chunk: int

    def run(self, backend: Backend) -> None:
        """See `Work`."""
        self.flags.up(self.chunk)

    def issued(self, places: Places) -> Issued:
        """See `Work`."""
        return "raise_flag", *self


class AwaitFlag(NamedTuple):
    """Wait until a kernel has set the flag of a chunk."""

    flags: _C.Flags
    chunk: int

    def run(self, backend: Backend) -> None:
        """See `Work`."""
        self.flags.wait(self.chunk)

    def issued(self, places: Places) -> Issued:
        """See `Work`."""
        return "await_flag", *self


class Launch(NamedTuple):
    """Launch a kernel that is compiled and loaded already; see csrc/issue/kernel.h.

    Attributes:
        function, threads, shared_bytes, parameters: see `symm_overlap.kernels.launchable.Launchable`.
        loaded: keeps the kernel loaded.
        programs: the number of programs.
    """

    function: int
    threads: int
    shared_bytes: int
    parameters: Sequence[tuple[Any, ...]]
    loaded: object
    programs: int

    def run(self, backend: Backend) -> None:
        """Never called: without a program, the step's own function lets Triton launch the kernel."""
        raise NotImplementedError

    def issued(self, places: Places) -> Issued:
        """See `Work`."""
        kernel, tensors = _C.Kernel(self.function, self.programs, self.threads, self.shared_bytes), []
        for name, *rest in self.parameters:
            if name != "number":
                tensors.append(places.operand(rest[0]))
                rest[0] = len(tensors) - 1
            getattr(kernel, name)(*rest)
        places.keep(self.loaded)
        return "launch", kernel, tensors


class Work(Protocol):
    """One of the records above."""

    def run(self, backend: Backend) -> None:
        """Compute it now."""

    def issued(self, places: Places) -> Issued:
        """Return how to append it to a program."""


WorkOf = Callable[[Step], Sequence[Work] | None]
"""Returns what a step computes; None if only the step's function in the table can compute it."""


def tensor_of(operand: Operand) -> Tensor:
    """Return an operand as a tensor."""
    if isinstance(operand, Slice):
        return operand.tensor.narrow(operand.dim, operand.start, operand.length)
    if isinstance(operand, Fixed):
        return operand.tensor
    return operand.view if isinstance(operand, Part) else operand


def view_of(operand: Tensor | Part, view: Callable[[Tensor], Tensor]) -> Part:
    """Return a view of an operand as a `Part`. If the operand is a whole tensor, it has to be contiguous."""
    return Part(operand.tensor if isinstance(operand, Part) else operand, view(tensor_of(operand)))


def carry_out(backend: Backend, work: Sequence[Work]) -> None:
    """Compute all of it now, one after another."""
    for each in work:
        each.run(backend)
