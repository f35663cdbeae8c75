"""The consumer of a weight that comes in parts: ``X @ W``, or ``X @ W.t()``, without W."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..runtime import Backend, Multiply, Part, Slice, Work, tensor_of, view_of
from .layouts import PartsLayout
from .parts import accumulator
from .telling import TellingConsumer


class WeightProducts(TellingConsumer):
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
        rank: the own one, whose part comes first.
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
        # Other ranks' parts contract other columns of X, or other pieces of a rank's part do.
        self.accumulates = layout.last if transpose else not layout.last or chunks > 1
        self.total = accumulator(product) if self.accumulates else product
        self.outputs = [self.total]
        self.operands = X, self.total

    def part_work(self, rank: int, start: int, part: Tensor | Part) -> Sequence[Work]:
        """See `Telling.part_work`."""
        return [self._product(rank, start, part, self.rank)]

    def shards_work(self, shards: Sequence[Tensor | Part]) -> Sequence[Work]:
        """See `TellingConsumer.shards_work`."""
        return [self._product(rank, 0, shard, 0) for rank, shard in enumerate(shards)]

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `Telling.work`."""
        return [Multiply(self.X, view_of(whole, Tensor.t) if self.transpose else whole, self.total)]

    def _product(self, rank: int, start: int, part: Tensor | Part, first: int) -> Work:
        """The product with rows ``start`` on of the part of ``rank``, where the parts of rank ``first`` come first."""
        layout, (rows, columns) = self.layout, tensor_of(part).shape
        top, left = (start, rank * layout.columns) if layout.last else (rank * layout.rows + start, 0)
        down, across = (top, rows), (left, columns)  # where the part lies in W
        begun = rank != first if self.transpose else start > 0 or (rank != first and not layout.last)
        contracted, made = (across, down) if self.transpose else (down, across)
        weight = view_of(part, Tensor.t) if self.transpose else part
        X, total = Slice(self.X, 1, *contracted), Slice(self.total, 1, *made)
        return Multiply(X, weight, total, self.accumulates and begun)

    def finish(self) -> None:
        """After the exchange: round the sums."""
        if self.total is not self.product:
            self.product.copy_(self.total)
