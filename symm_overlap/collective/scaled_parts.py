"""What is done with the parts of a collective in a scaled matmul of float8 numbers: `parts` has the protocols.

A part is multiplied with the scales of its own rows. The scales of all rows are there before the first part, so that no
step waits for any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from torch import Tensor

from ..runtime import Backend
from .layouts import GatherLayout
from .parts import Producer, in_rank_order, matrix, parts_of
from .places import Keep, Places
from .scaled import ScaledMatmul, Weight


class ScaledProducts:
    """Every gathered row times each weight, scaled. No part is a sum of others: rows are gathered, never columns."""

    accumulates = False

    def __init__(
        self, layout: GatherLayout, A_scale: Tensor, weights: Sequence[Weight], products: Sequence[Tensor]
    ) -> None:
        self.layout, self.outputs, self.A_scale, self.weights = layout, products, A_scale, weights
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


class _Cut:
    """A scaled product, cut into parts along a dimension of ``A`` or into blocks of columns.

    Where the rows of a part do not lie together in memory they are copied, here and now, and so are their scales; see
    `ScatteredProducts`.
    """

    def __init__(self, product: ScaledMatmul, scatter_dim: int, world: int) -> None:
        rows, lead = matrix(product.A.contiguous()), product.A.shape[:-1]
        scale = product.scale if product.scale.numel() == 1 else matrix(product.scale)
        scale, weight = product.weight.paired(scale, rows.shape[0])
        self.last = scatter_dim == len(lead)
        if self.last:
            self.As, self.scales, self.weights = [rows] * world, [scale] * world, weight.split(world)
            return
        self.all_A, self.all_scales = parts_of(rows.view(product.A.shape), scatter_dim, world), scale
        self.As, self.scales, self.weights = list(self.all_A), [scale] * world, [weight] * world
        if scale.dim():
            self.all_scales = parts_of(scale.view(*lead, 1), scatter_dim, world).contiguous()
            self.scales = list(self.all_scales)

    def part(self, owner: int, start: int, out: Tensor) -> None:
        """Write rows ``start`` on of what is for ``owner`` to ``out``."""
        rows = slice(start, start + out.shape[0])
        self.weights[owner].multiply(self.As[owner][rows], of_rows(self.scales[owner], rows), out)

    def whole(self, out: Tensor) -> None:
        """Write all rows, in rank order, to ``out``: of rows alone, since blocks of columns need as many matmuls."""
        scale = self.all_scales.flatten(0, 1) if self.all_scales.dim() else self.all_scales
        self.weights[0].multiply(self.all_A.flatten(0, 1), scale, out)


class ScatteredScaledProducts(Producer):
    """``sum(A @ B, scaled, for A, B) + addend``, cut into parts along a dimension; some are wanted whole too.

    ``torch._scaled_mm`` cannot add to what is there: each product but the first is made in memory of its own, rounded
    to its dtype, and added, and every sum is rounded too.

    What is kept is written part by part: each part is made where it is exchanged, and copied to its place; the own part
    is made there at once, where it is what is summed.

    Args:
        matmuls: products of one shape and dtype.
        keep: the products to keep, by their index.
        keep_sum: whether to keep the sum.

    Attributes:
        products: those that are kept, as matrices, by their index.
        total: the sum, as a matrix, if it is kept.
    """

    def __init__(
        self,
        backend: Backend,
        matmuls: Sequence[ScaledMatmul],
        addend: Tensor | None,
        shape: Sequence[int],
        scatter_dim: int,
        world: int,
        keep: Sequence[int],
        keep_sum: bool,
    ) -> None:
        self.backend, self.world, self.last = backend, world, scatter_dim == len(shape) - 1
        self.cut = [_Cut(matmul, scatter_dim, world) for matmul in matmuls]
        self.addend = None if addend is None else in_rank_order(addend, scatter_dim, world)
        like = matmuls[0].A.new_empty(0, dtype=matmuls[0].weight.dtype)
        rows, columns = prod(shape[:-1]), shape[-1]
        self.products = {index: backend.new_output(like, rows, columns) for index in keep}
        self.total = backend.new_output(like, rows, columns) if keep_sum else None
        self.kept = [*self.products.values(), *([] if self.total is None else [self.total])]
        if scatter_dim == 0 and not self.last:  # its rows lie in rank order
            alone = len(matmuls) == 1 and addend is None
            self.kept_sum = self.products.get(0) if self.total is None and alone else self.total
        self._places = Places(backend, shape, scatter_dim, world)

    @property
    def one_matmul(self) -> tuple[Tensor, Tensor, Weight] | None:
        """The rows in rank order, their scales, and the weight, if the parts are rows of one product and nothing else
        is made or kept.
        """
        if len(self.cut) != 1 or self.addend is not None or self.last or self.kept:
            return None
        (cut,) = self.cut
        return cut.all_A.flatten(0, 1), cut.all_scales, cut.weights[0]

    def part(self, owner: int, start: int, out: Tensor) -> None:
        """See `Producer.part`."""
        addend = None
        if self.addend is not None:
            first = owner * (self.addend.shape[0] // self.world) + start
            addend = self.addend[first : first + out.shape[0]]
        self._add_up(
            lambda cut, made: cut.part(owner, start, made), addend, out, partial(self._places.keep_part, owner, start)
        )

    def whole(self, out: Tensor) -> None:
        """See `Producer.whole`."""
        if not self.last:
            self._add_up(_Cut.whole, self.addend, out, self._places.keep_whole)
            return
        rows = out.shape[0] // self.world
        for owner in range(self.world):
            self.part(owner, 0, out[owner * rows : (owner + 1) * rows])

    def _add_up(self, multiply: Callable[[_Cut, Tensor], None], addend: Tensor | None, out: Tensor, keep: Keep) -> None:
        """Make the sum, and keep what is wanted on the way."""
        for number, cut in enumerate(self.cut):
            made = out if number == 0 else self.backend.new_output(out, *out.shape)
            multiply(cut, made)
            if number in self.products:
                keep(self.products[number], made)
            if made is not out:
                out.add_(made)
        if addend is not None:
            out.add_(addend)
        if self.total is not None:
            keep(self.total, out)


def of_rows(scale: Tensor, rows: slice) -> Tensor:
    """The scales of some rows; of one number, that number."""
    if scale.dim() == 0:
        return scale
    part = scale[rows]
    # cuBLAS reads scales of rows from addresses that are multiples of 16 bytes only.
    return part if part.data_ptr() % 16 == 0 else part.clone()
