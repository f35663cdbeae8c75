"""The computation on the parts of a collective in a scaled matmul of float8 numbers. `protocol` says what they are.

A part is multiplied with the scales of its own rows. The scales of all rows are available before the first part, so
that no step waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from torch import Tensor

from ...runtime import Add, Backend, Make, Operand, Part, Slice, Work, tensor_of, view_of
from ..layouts import GatherLayout
from ..scaled import ScaledMatmul, Weight
from .described import DescribedConsumer, DescribedParts
from .places import Keep, Places
from .protocol import Producer
from .scattered import in_rank_order, matrix


class ScaledProducts(DescribedConsumer):
    """Multiplies every gathered row with each weight, scaled. Only rows are gathered, so parts are never summed."""

    accumulates = False

    def __init__(
        self,
        backend: Backend,
        layout: GatherLayout,
        A_scale: Tensor,
        weights: Sequence[Weight],
        products: Sequence[Tensor],
    ) -> None:
        self.backend, self.layout, self.outputs = backend, layout, products
        self.A_scale, self.weights = A_scale, weights
        self.factors = [weight.paired(A_scale, layout.total_rows) for weight in weights]
        self.operands = (*(each for scale, weight in self.factors for each in (scale, *weight.tensors)), *products)
        self.variant = tuple(weight.variant for _, weight in self.factors)

    def part_work(self, rank: int, start: int, part: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.part_work`."""
        first, rows = rank * self.layout.rows + start, tensor_of(part).shape[0]
        return [
            weight.matmul(part, of_rows(scale, first, rows), Slice(product, 0, first, rows))
            for (scale, weight), product in zip(self.factors, self.outputs, strict=True)
        ]

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.work`."""
        return [
            weight.matmul(whole, scale, product)
            for (scale, weight), product in zip(self.factors, self.outputs, strict=True)
        ]


class _Cut:
    """A scaled product, cut into parts along a dimension of ``A`` or into blocks of columns.

    If the rows of a part are not together in memory, the constructor copies them and their scales; see
    `ScatteredProducts`.
    """

    def __init__(self, product: ScaledMatmul, scatter_dim: int, world: int) -> None:
        A, lead = product.A.contiguous(), product.A.shape[:-1]
        scale = product.scale if product.scale.numel() == 1 else matrix(product.scale)
        self.world, self.last = world, scatter_dim == len(lead)
        self.scale, self.weight = product.weight.paired(scale, prod(lead))
        self.A = matrix(A) if self.last else in_rank_order(A, scatter_dim, world)
        if self.scale.dim() and not self.last:
            self.scale = in_rank_order(self.scale.view(*lead, 1), scatter_dim, world).contiguous()
        self.operands = self.A, self.scale, *self.weight.tensors

    def part_work(self, owner: int, start: int, out: Operand) -> Work:
        """Write rows ``start`` on of the part for ``owner`` to ``out``."""
        rows, columns = tensor_of(out).shape
        first = start if self.last else owner * (self.A.shape[0] // self.world) + start
        A, scale = Slice(self.A, 0, first, rows), of_rows(self.scale, first, rows)
        if self.last:
            return self.weight.matmul_of_block(A, scale, out, owner * columns, columns)
        return self.weight.matmul(A, scale, out)

    def work(self, out: Operand) -> Work:
        """Write all rows, in rank order, to ``out``. Only if parts are rows: blocks of columns need one matmul each."""
        return self.weight.matmul(self.A, self.scale, out)


class ScatteredScaledProducts(DescribedParts, Producer):
    """``sum(A @ B, scaled, for A, B) + addend``, cut into parts along a dimension. Some products, or the sum, may be
    kept.

    ``torch._scaled_mm`` cannot accumulate into an existing tensor. Each product except the first is computed in memory
    of its own, rounded to its dtype, and added. Every sum is rounded too.

    Kept tensors are written part by part. Each part is computed where it is exchanged, and copied to its place in the
    kept tensor. If the kept tensor is what is summed over ranks, the local part is computed directly in its place.

    Args:
        matmuls: products of one shape and dtype.
        keep: the indices of the products to keep.
        keep_sum: whether to keep the sum.

    Attributes:
        products: the kept products, as matrices, by their index.
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
        if scatter_dim == 0 and not self.last:  # the rows are in rank order
            alone = len(matmuls) == 1 and addend is None
            self.kept_sum = self.products.get(0) if self.total is None and alone else self.total
        self._places = Places(shape, scatter_dim, world)
        operands = [each for cut in self.cut for each in cut.operands] + self.kept
        self.operands = operands if self.addend is None else [*operands, self.addend]
        self.variant = tuple(cut.weight.variant for cut in self.cut)

    @property
    def only_factors(self) -> tuple[Tensor, Tensor, Weight] | None:
        """The rows in rank order, their scales, and the weight, if the parts are rows of one product and nothing else
        is kept.
        """
        if len(self.cut) != 1 or self.addend is not None or self.last or self.kept:
            return None
        (cut,) = self.cut
        return cut.A, cut.scale, cut.weight

    def part_work(self, owner: int, start: int, part: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.part_work`."""
        addend = None
        if self.addend is not None:
            first = owner * (self.addend.shape[0] // self.world) + start
            addend = Slice(self.addend, 0, first, tensor_of(part).shape[0])
        keep = partial(self._places.keep_part, owner, start)
        return self._add_up(lambda cut, made: cut.part_work(owner, start, made), addend, part, keep)

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """See `DescribedParts.work`."""
        if not self.last:
            return self._add_up(_Cut.work, self.addend, whole, self._places.keep_whole)

        def part_of(owner: int) -> Part:
            return view_of(whole, lambda out: out.chunk(self.world)[owner])

        return [work for owner in range(self.world) for work in self.part_work(owner, 0, part_of(owner))]

    def _add_up(
        self, multiply: Callable[[_Cut, Operand], Work], addend: Operand | None, out: Tensor | Part, keep: Keep
    ) -> list[Work]:
        """Compute the sum, and keep the wanted tensors on the way."""
        work: list[Work] = []
        made: Tensor | Part = out
        for number, cut in enumerate(self.cut):
            if number == 1:
                made = self.backend.new_output(tensor_of(out), *tensor_of(out).shape)
                work.append(Make(made))
            work.append(multiply(cut, made))
            if number in self.products:
                work += keep(self.products[number], made)
            if number:
                work.append(Add(out, made))
        if addend is not None:
            work.append(Add(out, addend))
        return work if self.total is None else [*work, *keep(self.total, out)]


def of_rows(scale: Tensor, first: int, rows: int) -> Operand:
    """Return the scales of some rows. If the scale is one number, return that number."""
    return Slice(scale, 0, first, rows) if scale.dim() else scale
