"""The consumer of a weight that comes in parts: ``X @ W``, or ``X @ W.t()``, without W."""

from __future__ import annotations

from torch import Tensor

from ..runtime import Backend
from .layouts import PartsLayout
from .parts import accumulator


class WeightProducts:
    """``product = X @ W``, or ``X @ W.t()``, where W is what is gathered.

    A part of W is some of its rows and, if W is gathered along its last dimension, some of its columns. Multiplied from
    the right it contracts columns of X and makes columns of the product; which of the two its rows stand for depends on
    whether W is transposed. Where several parts make the same columns their products are added up, for half precision
    in float32, which `finish` rounds once.

    Args:
        layout: how parts lie in W.
        X: (rows, contracted).
        transpose: whether the product is ``X @ W.t()``.
        product: (rows, columns).
        chunks: pieces that each rank's part may come in.
    """

    def __init__(
        self, backend: Backend, layout: PartsLayout, X: Tensor, transpose: bool, product: Tensor, chunks: int
    ) -> None:
        self.backend, self.layout, self.X, self.transpose, self.product = backend, layout, X, transpose, product
        # Other ranks' parts contract other columns of X, or other pieces of a rank's part do.
        self.accumulates = layout.last if transpose else not layout.last or chunks > 1
        self.total = accumulator(product) if self.accumulates else product
        self.outputs = [self.total]
        self._begun: set[int] = set()  # by their first one, columns that a part has been added up in

    def part(self, rank: int, start: int, part: Tensor) -> None:
        """See `Consumer.part`."""
        layout = self.layout
        first, left = (start, rank * layout.columns) if layout.last else (rank * layout.rows + start, 0)
        rows, columns = slice(first, first + part.shape[0]), slice(left, left + part.shape[1])
        contracted, made = (columns, rows) if self.transpose else (rows, columns)
        X, weight, target = self.X[:, contracted], part.t() if self.transpose else part, self.total[:, made]
        add = self.accumulates and made.start in self._begun
        self._begun.add(made.start)
        if target.dtype == part.dtype:
            self.backend.multiply(X, weight, target, add)
        elif add:
            target.add_(X @ weight)
        else:
            target.copy_(X @ weight)

    def shards(self, shards: list[Tensor]) -> None:
        """See `Consumer.shards`."""
        for rank, shard in enumerate(shards):
            self.part(rank, 0, shard)

    def whole(self, gathered: Tensor) -> None:
        """See `Consumer.whole`."""
        self.backend.multiply(self.X, gathered.t() if self.transpose else gathered, self.product)
        if self.total is not self.product:
            self.total.copy_(self.product)

    def finish(self) -> None:
        """After the exchange: round the sums."""
        if self.total is not self.product:
            self.product.copy_(self.total)
