"""In which order the elements of a product are reduced. The op reduces them as they lie, and its result is put into
this order afterwards: a scattered part of it is smaller than the product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch.fx import Node

from .._torch import known
from ..arrangement import Atom, Size
from ..graph import aten
from ..writer import SymbolicSizeError, Writer
from .gathered import permutation
from .pattern import SkipError


@dataclass(frozen=True)
class Order:
    """An order of elements: as dimensions of these sizes, which are then permuted. Empty if it is that of the product.

    Attributes:
        sizes: the sizes of the dimensions in the product.
        dims: the dimensions in the new order.
    """

    sizes: tuple[Size, ...] = ()
    dims: tuple[int, ...] = ()

    @staticmethod
    def between(given: Sequence[Atom], wanted: Sequence[Atom]) -> Order:
        """Return the order that makes ``wanted`` of ``given``.

        Raises:
            SkipError: they are not the same atoms; see `permutation`.
        """
        try:
            indices = permutation(given, wanted)
        except SymbolicSizeError as error:
            raise SkipError(f"sizes are symbolic: {error}") from None
        runs: list[list[int]] = []  # atoms that stay next to each other are one dimension
        for index in indices:
            if runs and runs[-1][-1] == index - 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        if len(runs) < 2:
            return Order()
        ordered = sorted(runs)
        sizes = (prod(given[index].size for index in run) for run in ordered)
        return Order(tuple(sizes), tuple(map(ordered.index, runs)))

    def same(self, other: Order) -> bool:
        """True if the two orders are known to be equal."""
        return self.dims == other.dims and all(known(a == b) for a, b in zip(self.sizes, other.sizes, strict=True))

    def of(self, write: Writer, node: Node) -> Node:
        """Return what an op has computed in this order."""
        if not self.dims:
            return node
        return write.call(aten.permute.default, write.reshape(node, self.sizes), list(self.dims))
