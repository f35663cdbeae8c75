"""The producers of an all-reduce: what is done with the parts of a matrix that is summed over ranks for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..runtime import Backend, Copy, Multiply, Operand, Slice, Work, carry_out, tensor_of


class RowProducer(Protocol):
    """Makes a matrix that is summed over ranks for all of them; ranks share out its rows, which need not divide."""

    def rows(self, start: int, out: Tensor) -> None:
        """Write rows ``start`` on to ``out``."""

    def whole(self, out: Tensor) -> None:
        """Write everything to ``out``, which is contiguous and may have another shape."""


@runtime_checkable
class TellsRows(Protocol):
    """A `RowProducer` that can tell what it does, as others do by `symm_overlap.collective.parts.TellsWork`."""

    operands: Sequence[Tensor]

    def work(self, whole: Tensor) -> Sequence[Work] | None:
        """What ``whole(whole)`` does, if it is no more than multiplications, copies and sums."""

    def rows_work(self, start: int, out: Operand) -> Sequence[Work] | None:
        """What ``rows(start, out)`` does, if it is no more than that."""


class RowProducts:
    """``A @ B + bias``."""

    def __init__(self, backend: Backend, A: Tensor, B: Tensor, bias: Tensor | None = None) -> None:
        self.backend, self.A, self.B, self.bias = backend, A, B, bias
        self.operands = A, B

    def rows(self, start: int, out: Tensor) -> None:
        """See `RowProducer.rows`."""
        self._make(self._products(start, out), out)

    def whole(self, out: Tensor) -> None:
        """See `RowProducer.whole`."""
        product = out.view(self.A.shape[0], self.B.shape[1])
        self._make([Multiply(self.A, self.B, product)], product)

    def work(self, whole: Tensor) -> Sequence[Work] | None:
        """See `TellsRows.work`."""
        product = whole.view(self.A.shape[0], self.B.shape[1])
        return [Multiply(self.A, self.B, product)] if self.bias is None else None

    def rows_work(self, start: int, out: Operand) -> Sequence[Work] | None:
        """See `TellsRows.rows_work`."""
        return self._products(start, out) if self.bias is None else None

    def _products(self, start: int, out: Operand) -> list[Work]:
        return [Multiply(_rows_of(self.A, start, out), self.B, out)]

    def _make(self, products: Sequence[Work], out: Tensor) -> None:
        carry_out(self.backend, products)
        if self.bias is not None:
            out.add_(self.bias)


class Rows:
    """The rows of a tensor that is there already."""

    def __init__(self, backend: Backend, X: Tensor) -> None:
        self.backend, self.X = backend, X
        self.operands = (X,)

    def rows(self, start: int, out: Tensor) -> None:
        """See `RowProducer.rows`."""
        carry_out(self.backend, self.rows_work(start, out))

    def whole(self, out: Tensor) -> None:
        """See `RowProducer.whole`."""
        carry_out(self.backend, self.work(out))

    def work(self, whole: Tensor) -> Sequence[Work]:
        """See `TellsRows.work`."""
        return [Copy(whole.view(self.X.shape), self.X)]

    def rows_work(self, start: int, out: Operand) -> Sequence[Work]:
        """See `TellsRows.rows_work`."""
        return [Copy(out, _rows_of(self.X, start, out))]


def _rows_of(tensor: Tensor, start: int, out: Operand) -> Slice:
    """As many rows as ``out`` has; the last ranks may have none, and begin behind the end."""
    return Slice(tensor, 0, min(start, tensor.shape[0]), tensor_of(out).shape[0])
