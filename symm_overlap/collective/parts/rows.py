"""The producers of an all-reduce: they compute the parts of a matrix that is summed over ranks, for all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...runtime import Add, Backend, Copy, Multiply, Operand, Part, Slice, Work, tensor_of, view_of
from .described import DescribedRows
from .products import present


class RowProducts(DescribedRows):
    """``A @ B + bias``."""

    def __init__(self, backend: Backend, A: Tensor, B: Tensor, bias: Tensor | None) -> None:
        self.backend, self.A, self.B, self.bias = backend, A, B, bias
        self.operands = (A, B) if bias is None else (A, B, bias)

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `DescribedRows.work`."""
        return self._products(self.A, view_of(whole, lambda out: out.view(self.A.shape[0], self.B.shape[1])))

    def rows_work(self, start: int, out: Tensor | Part) -> Sequence[Work]:
        """See `DescribedRows.rows_work`."""
        return self._products(_rows_of(self.A, start, out), out)

    def _products(self, A: Operand, out: Operand) -> list[Work]:
        return [Multiply(A, self.B, out, bias=self.bias)]


class RowSums(DescribedRows):
    """``sum(A @ B + bias for A, B, bias) + addend``.

    Args:
        As, Bs, biases: the factors and the bias, or None, of each product; at least one.
    """

    def __init__(
        self,
        backend: Backend,
        As: Sequence[Tensor],
        Bs: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        addend: Tensor | None,
    ) -> None:
        self.backend, self.As, self.Bs, self.biases, self.addend = backend, As, Bs, biases, addend
        self.operands = *As, *Bs, *present([*biases, addend])

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `DescribedRows.work`."""
        rows, columns = self.As[0].shape[0], self.Bs[0].shape[1]
        return self._sum(self.As, self.addend, view_of(whole, lambda out: out.view(rows, columns)))

    def rows_work(self, start: int, out: Tensor | Part) -> Sequence[Work]:
        """See `DescribedRows.rows_work`."""
        addend = None if self.addend is None else _rows_of(self.addend, start, out)
        return self._sum([_rows_of(A, start, out) for A in self.As], addend, out)

    def _sum(self, As: Sequence[Operand], addend: Operand | None, out: Operand) -> list[Work]:
        work: list[Work] = [
            Multiply(A, B, out, number > 0, bias)
            for number, (A, B, bias) in enumerate(zip(As, self.Bs, self.biases, strict=True))
        ]
        return work if addend is None else [*work, Add(out, addend)]


class Rows(DescribedRows):
    """The rows of an existing tensor."""

    def __init__(self, backend: Backend, X: Tensor) -> None:
        self.backend, self.X = backend, X
        self.operands = (X,)

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `DescribedRows.work`."""
        return [Copy(view_of(whole, lambda out: out.view(self.X.shape)), self.X)]

    def rows_work(self, start: int, out: Tensor | Part) -> Sequence[Work]:
        """See `DescribedRows.rows_work`."""
        return [Copy(out, _rows_of(self.X, start, out))]


def _rows_of(tensor: Tensor, start: int, out: Operand) -> Slice:
    """Return as many rows as ``out`` has. The last ranks may have none; their start is then beyond the end."""
    return Slice(tensor, 0, min(start, tensor.shape[0]), tensor_of(out).shape[0])
