"""The consumer of a weight that arrives in parts: ``X @ W``, or ``X @ W.t()``, without the whole W."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...runtime import Backend, Multiply, Part, Slice, Work, tensor_of, view_of
from ..layouts import PartsLayout
from .described import DescribedConsumer
from .products import accumulator


class WeightProducts(DescribedConsumer):
    """``product = X @ W``, or ``X @ W.t()``, where W is gathered.

    A part of W is some of its rows and, if W is gathered along its last dimension, some of its columns. One dimension
    of the part contracts columns of X. The other produces columns of the product. Which is which depends on
    ``transpose``. If several parts contribute to the same columns, their products are added up, for half precision in
    float32, and `finish` rounds the sum once.

    Args:
        layout: where the parts are in W.
        X: (rows, contracted).
        transpose: whether the product is ``X @ W.t()``.
        product: (rows, columns).
        chunks: number of chunks in which each rank's part may arrive.
        rank: this rank, whose part comes first.
    """

    def __init__(
        self,
        backend: Backend,
        layout: PartsLayout,
        X: Tensor,
        transpose: bool,
        product: Tensor,
        chunks: int,
        rank: int,
    ) -> None:
        self.backend, self.layout, self.X, self.transpose, self.product = backend, layout, X, transpose, product
        self.rank = rank
        # Parts of other ranks, or other chunks of one rank's part, contract other columns of X.
        self.accumulates = layout.last if transpose else not layout.last or chunks > 1
        self.total = accumulator(product) if self.accumulates else product
        self.outputs = [self.total]
        self.operands = X, self.total

    def part_work(self, rank: int, start: int, part: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.part_work`."""
        return [self._product(rank, start, part, self.rank)]

    def shards_work(self, shards: Sequence[Tensor | Part]) -> Sequence[Work]:
        """See `DescribedConsumer.shards_work`."""
        return [self._product(rank, 0, shard, 0) for rank, shard in enumerate(shards)]

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.work`."""
        return [Multiply(self.X, view_of(whole, Tensor.t) if self.transpose else whole, self.total)]

    def _product(self, rank: int, start: int, part: Tensor | Part, first: int) -> Work:
        """Return the product with rows ``start`` on of the part of ``rank``. The parts of rank ``first`` come first."""
        layout, (rows, columns) = self.layout, tensor_of(part).shape
        top, left = (start, rank * layout.columns) if layout.last else (rank * layout.rows + start, 0)
        down, across = (top, rows), (left, columns)  # where the part is in W
        begun = rank != first if self.transpose else start > 0 or (rank != first and not layout.last)
        contracted, made = (across, down) if self.transpose else (down, across)
        weight = view_of(part, Tensor.t) if self.transpose else part
        X, total = Slice(self.X, 1, *contracted), Slice(self.total, 1, *made)
        return Multiply(X, weight, total, self.accumulates and begun)

    def finish(self) -> None:
        """Round the sums, after the exchange."""
        if self.total is not self.product:
            self.product.copy_(self.total)
