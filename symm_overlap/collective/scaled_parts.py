"""What is done with the parts of a collective in a scaled matmul of float8 numbers: `parts` has the protocols.

A part is multiplied with the scales of its own rows. The scales of all rows are there before the first part, so that no
step waits for any.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from ..runtime import Backend
from .layouts import GatherLayout
from .parts import Producer, matrix, parts_of
from .places import Places
from .scaled import Weight


class ScaledProducts:
    """Every gathered row times each weight, scaled. No part is a sum of others: rows are gathered, never columns."""

    accumulates = False

    def __init__(
        self, layout: GatherLayout, A_scale: Tensor, weights: Sequence[Weight], products: Sequence[Tensor]
    ) -> None:
        self.layout, self.outputs = layout, products
        self.factors = [weight.paired(A_scale, layout.total_rows) for weight in weights]

    def part(self, rank: int, start: int, part: Tensor) -> None:
        """See `Consumer.part`."""
        first = rank * self.layout.rows + start
        self._multiply(part, slice(first, first + part.shape[0]))

    def shards(self, shards: Sequence[Tensor]) -> None:
        """See `Consumer.shards`."""
        for rank, shard in enumerate(shards):
            self.part(rank, 0, shard)

    def whole(self, gathered: Tensor) -> None:
        """See `Consumer.whole`."""
        self._multiply(gathered, slice(None))

    def _multiply(self, part: Tensor, rows: slice) -> None:
        for (scale, weight), product in zip(self.factors, self.outputs, strict=True):
            weight.multiply(part, of_rows(scale, rows), product[rows])


class ScatteredScaledProduct(Producer):
    """``A @ B``, scaled, cut into parts along a dimension of ``A`` or into blocks of columns.

    Where the rows of a part do not lie together in memory they are copied, here and now, and so are their scales; see
    `ScatteredProducts`.

    Args:
        A: of the shape of the product, but for the last dimension.
        A_scale: one number, or (rows of all of ``A``, 1).
    """

    def __init__(self, A: Tensor, A_scale: Tensor, weight: Weight, scatter_dim: int, world: int) -> None:
        rows = matrix(A)
        self.undivided = scale, weight = weight.paired(A_scale, rows.shape[0])
        self.last = scatter_dim == A.dim() - 1
        if self.last:
            self.As, self.scales, self.weights = [rows] * world, [scale] * world, weight.split(world)
            return
        self.all_A, self.all_scales = parts_of(A, scatter_dim, world), scale
        self.As, self.scales, self.weights = list(self.all_A), [scale] * world, [weight] * world
        if scale.dim():
            self.all_scales = parts_of(scale.view(*A.shape[:-1], 1), scatter_dim, world).contiguous()
            self.scales = list(self.all_scales)

    def part(self, owner: int, start: int, out: Tensor) -> None:
        """See `Producer.part`."""
        rows = slice(start, start + out.shape[0])
        self.weights[owner].multiply(self.As[owner][rows], of_rows(self.scales[owner], rows), out)

    def whole(self, out: Tensor) -> None:
        """See `Producer.whole`."""
        if not self.last:
            scale = self.all_scales.flatten(0, 1) if self.all_scales.dim() else self.all_scales
            self.weights[0].multiply(self.all_A.flatten(0, 1), scale, out)
            return
        rows = self.As[0].shape[0]
        for owner in range(len(self.As)):
            self.part(owner, 0, out[owner * rows : (owner + 1) * rows])


class KeptScaledProduct(ScatteredScaledProduct):
    """The same product, which the caller wants whole too.

    Every part is made where it is exchanged, and copied to its place; the own part is made there at once, where it is
    what is summed.

    Attributes:
        product: the whole, as a matrix.
    """

    def __init__(
        self, backend: Backend, A: Tensor, A_scale: Tensor, weight: Weight, scatter_dim: int, world: int
    ) -> None:
        super().__init__(A, A_scale, weight, scatter_dim, world)
        shape = (*A.shape[:-1], weight.B.shape[1])
        self.places = Places(backend, shape, scatter_dim, world)
        self.product = backend.new_output(A.new_empty(0, dtype=weight.dtype), prod(shape[:-1]), shape[-1])
        self.kept = (self.product,)
        if scatter_dim == 0 and not self.last:  # its rows lie in rank order
            self.kept_sum = self.product

    def part(self, owner: int, start: int, out: Tensor) -> None:
        """See `Producer.part`."""
        super().part(owner, start, out)
        self.places.keep_part(owner, start, self.product, out)

    def whole(self, out: Tensor) -> None:
        """See `Producer.whole`."""
        if not self.last:
            super().whole(out)
            self.places.keep_whole(self.product, out)
            return
        # A part is a block of columns of the product, which is made first, with one matmul.
        scale, weight = self.undivided
        weight.multiply(self.As[0], scale, self.product)
        self.places.take_whole(self.product, out)


def of_rows(scale: Tensor, rows: slice) -> Tensor:
    """The scales of some rows; of one number, that number."""
    if scale.dim() == 0:
        return scale
    part = scale[rows]
    # cuBLAS reads scales of rows from addresses that are multiples of 16 bytes only.
    return part if part.data_ptr() % 16 == 0 else part.clone()
