"""The terms that are added on this rank before a reduce-scatter. Each is rearranged on its way to the collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .._torch import known
from ..arrangement import Dimension, Size, atoms_of, of_shape, settled, size_of, take
from ..graph import aten, step_of, value
from ..matmul import Matmul, matmul_of, why_no_matmul
from .casts import has_product, is_widening, why_cast
from .pattern import SkipError, ancestors, arranged
from .sums import is_plain_sum, why_uneven

_SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)

NO_PRODUCT = "what is reduced is not a whole product of a matmul, nor a sum with one"
"""Why a reduction without products among its terms is skipped. A part of a product may be reduced, or several products
side by side."""


@dataclass(frozen=True)
class Term:
    """One tensor of the sum.

    Attributes:
        path: the nodes that rearrange it on its way to the collective.
        shared: set if something else uses the product too, or a view of it: the same term as an existing tensor.
        cast: set if the product is cast before it is added: the same term as what it is cast to.
    """

    node: Node
    path: tuple[Node, ...]
    shared: Term | None = None
    cast: Term | None = None

    @property
    def computed_before(self) -> Term:
        """The same term as a tensor that is computed before the op."""
        return self.shared or self.cast or Term(self.node, self.path)

    @property
    def inputs(self) -> list[Node]:
        """The nodes that must be computed before the op."""
        return [self.node]


@dataclass(frozen=True, kw_only=True)
class Product(Term):
    """A term that is a matmul. The op computes it."""

    matmul: Matmul

    @property
    def inputs(self) -> list[Node]:
        """See `Term.inputs`."""
        return self.matmul.inputs


@dataclass(frozen=True)
class Place:
    """The position of the scattered dimension in a matrix.

    Attributes:
        before, after: the number of rows before and after it; with ``last``, the number of rows and of columns.
        last: whether ranks get blocks of columns instead of rows.
    """

    before: Size
    after: Size
    last: bool

    def same(self, other: Place) -> bool:
        """True if the two places are known to be equal."""
        return self.last == other.last and known(self.before == other.before) and known(self.after == other.after)


class Terms:
    """The terms of the sum that is the input of a collective.

    Attributes:
        total: the sum itself, if something else uses it.
        out_dtype: the dtype to which the sum is cast before it is reduced; None: it is not cast.
    """

    def __init__(self, collective: Node) -> None:
        self.all: list[Term] = []
        self.total: Term | None = None
        self.out_dtype: torch.dtype | None = None
        self._follow(collective.args[0], (), [collective], None, outermost=True)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Term]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def products(self) -> list[Product]:
        """The terms that are matmuls."""
        return [term for term in self if isinstance(term, Product)]

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The dtype in which the terms are added, if the products are cast to it before; None: that of the products."""
        return next((value(each.cast.node).dtype for each in self.products if each.cast is not None), None)

    @property
    def unknown(self) -> str:
        """Why matmuls among the terms cannot be replaced; empty if there are none."""
        whys = (why_no_matmul(term.node) or why_cast(term.node) or why_uneven(term.node) for term in self)
        return next(filter(None, whys), "")

    @property
    def why_none(self) -> str:
        """Why there is no product among the terms."""
        if not self.unknown and any(has_product(term.node, _SCALINGS) for term in self):
            return "a product is multiplied or divided by something before it is reduced"
        return self.unknown or NO_PRODUCT

    @property
    def inputs(self) -> list[Node]:
        """The nodes that must be computed before the op."""
        return [node for term in self for node in term.inputs]

    def _follow(
        self,
        node: Node,
        path: tuple[Node, ...],
        readers: Iterable[Node],
        shared: Term | None,
        outermost: bool,
        cast: Term | None = None,
    ) -> None:
        """Collect the terms that a node is computed from.

        Args:
            path: the nodes from this node to the collective.
            readers: the users of the node on that path.
            shared: among the nodes so far, the one nearest to the collective that is used elsewhere too.
            outermost: whether the node is the whole sum.
            cast: among the nodes so far, the cast of this product alone.
        """
        step, matmul = step_of(node), matmul_of(node)
        through = () if step is None else step.through
        if shared is None and not _is_alone(node, readers, through):
            shared = Term(node, path)
        if step is not None and (shared is None or outermost or _is_product(step.source)):
            self._follow(step.source, (node, *path), (*through, node), shared, outermost, cast)
        elif node.target is aten.add.Tensor and (shared is None or outermost) and is_plain_sum(node):
            if shared is not None:
                self.total = Term(node, path)
            for operand in node.args[:2]:
                self._follow(operand, path, [node], None, outermost=False)  # type: ignore[arg-type]
        elif shared is None and is_widening(node) and (outermost or self._adds_cast_product(node)):
            if outermost:
                self.out_dtype = value(node).dtype
            else:
                cast = Term(node, path)
            self._follow(node.args[0], (node, *path), [node], None, outermost, cast)  # type: ignore[arg-type]
        elif matmul is not None:
            self.all.append(Product(node, path, shared, cast, matmul=matmul))
        else:
            self.all.append(shared or Term(node, path))

    def _adds_cast_product(self, cast: Node) -> bool:
        """True if the op can compute what is cast: one product that nothing else uses, like those that it has so far.

        It adds the products in the dtype to which they are cast.
        """
        node: Any = cast.args[0]
        readers: tuple[Node, ...] = (cast,)
        while (step := step_of(node)) is not None:
            if not _is_alone(node, readers, step.through):
                return False
            node, readers = step.source, (*step.through, node)
        found = matmul_of(node)
        if found is None or found.scaled is not None or not _is_alone(node, readers, ()):
            return False
        if found.other_bias is not None:
            return False
        # The op does not add products that are not cast: see `settle`.
        return {value(term.node).dtype for term in self.products} <= {value(node).dtype, value(cast).dtype}

    def settle(self, world: int) -> Place:
        """Return the position of the scattered dimension, which must be the same in every term and in the sum.

        A product that the op cannot compute together with the others becomes an ordinary term, which is computed before
        the op. This applies to scaled products in a sum with other matmuls, and either to products that are cast or to
        the others, if a sum has both. It also applies to a product that is cast or used elsewhere, if it has another
        layout than the others, or if another term depends on it.

        Raises:
            SkipError: there is no such position.
        """
        if not all(map(_is_scaled, self.products)):
            self.all = [term.computed_before if _is_scaled(term) else term for term in self]
        place = _place(min(self, key=lambda term: (term.shared or term.cast) is not None), world)
        for number, term in enumerate(self):
            if (term.shared or term.cast) is not None and not _lies_at(place, term, world):
                self.all[number] = term = term.computed_before
            if not _place(term, world).same(place):
                raise SkipError("the tensors that are added are scattered along different dimensions")
        self._settle_casts()
        if self.total is not None and not _lies_at(place, self.total, world):
            raise SkipError("the sum is used elsewhere too, in another arrangement than its terms")
        while (needed := self._first_needed()) is not None:
            self.all = [needed.shared or term if term is needed else term for term in self]
        return place

    def _settle_casts(self) -> None:
        """If a sum has products that are cast, and others, leave those to the op that take it longer.

        Raises:
            SkipError: all products are cast, and the sum is used elsewhere too, which the op does not return.
        """
        cast = [product for product in self.products if product.cast is not None]
        others = [product for product in self.products if product.cast is None]
        if not cast or not (others or self.total):
            return
        if not others:
            raise SkipError("products are cast before they are added, and the sum is used elsewhere too")
        given_up = cast if self.total is not None or known(_work(others) > _work(cast)) else others
        self.all = [term.computed_before if term in given_up else term for term in self]

    def _first_needed(self) -> Term | None:
        """Return the first product that is used elsewhere and that another term depends on, or None."""
        if not any(term.shared for term in self):
            return None
        behind = ancestors(self.inputs)
        return next((term for term in self if term.shared and term.node in behind), None)


def _is_alone(node: Node, readers: Iterable[Node], through: tuple[Node, ...]) -> bool:
    """True if nothing else uses a node, nor the nodes between it and what it rearranges."""
    return set(node.users) <= set(readers) and all(set(part.users) <= {*through, node} for part in through)


def _work(products: Iterable[Product]) -> Size:
    """Return a measure for the time of products of one shape."""
    return sum(value(each.matmul.left).shape[-1] * value(each.node).dtype.itemsize for each in products)


def _is_product(node: Node) -> bool:
    """True if the node is a matmul, or rearranges one."""
    while (step := step_of(node)) is not None:
        node = step.source
    return matmul_of(node) is not None


def _is_scaled(term: Term) -> bool:
    return isinstance(term, Product) and term.matmul.scaled is not None


def _lies_at(place: Place, term: Term, world: int) -> bool:
    try:
        return _place(term, world).same(place)
    except SkipError:
        return False


def _place(term: Term, world: int) -> Place:
    """Return the position in a term of the dimension that the collective scatters."""
    start = of_shape(value(term.node).shape)
    arrangement = arranged(start, term.path)
    first = list(settled(arrangement)[0])
    ranks = take(first, world)
    if ranks is None:
        raise SkipError("the collective's parts do not fit the dimensions of the product, as far as is known")
    *lead, columns = settled(start)
    rows = tuple(atom for dimension in lead for atom in dimension)
    ranks = settled((ranks,))[0]
    if atoms_of((tuple(first), *arrangement[1:])) == atoms_of((_without(rows, ranks), columns)):
        at = _index(rows, ranks)
        if at is not None:
            return Place(size_of(rows[:at]), size_of(rows[at + len(ranks) :]), False)
    if columns[: len(ranks)] == ranks and atoms_of((tuple(first), *arrangement[1:])) == [*rows, *columns[len(ranks) :]]:
        return Place(size_of(rows), size_of(columns[len(ranks) :]), True)
    raise SkipError("a rank's part is not a block of rows or of columns of the product")


def _index(atoms: Dimension, part: Dimension) -> int | None:
    """Return the index at which ``part`` begins in ``atoms``, or None."""
    return next((at for at in range(len(atoms)) if atoms[at : at + len(part)] == part), None)


def _without(atoms: Dimension, part: Dimension) -> Dimension:
    return tuple(atom for atom in atoms if atom not in part)
