"""The terms that are added on this rank before a reduce-scatter. Each is rearranged on its way to the collective."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..graph import aten, step_of, value
from ..matmul import Matmul, is_of_different_matrices, matmul_of, why_no_matmul
from .casts import has_product, is_widening, why_cast
from .pattern import SkipError, ancestors
from .place import Place, lies_at, place_in
from .sums import is_plain_sum, why_part, why_uneven
from .trimmed import why_trimmed_before

_SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)

NO_PRODUCT = "what is reduced is not a whole product of a matmul, nor a sum with one"
"""Why a reduction without products among its terms is skipped. A part of a product may be reduced, or several products
side by side."""


_KEPT = "a product that an op of symm_overlap returns"


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


class _Found(NamedTuple):
    """A node from which the input of a collective is computed.

    Attributes:
        path: the nodes from this node to the collective.
        readers: the users of the node on that path.
        outermost: whether the node is the whole sum.
        shared: among the nodes so far, the one nearest to the collective that is used elsewhere too.
        cast: among the nodes so far, the cast of this product alone.
    """

    node: Node
    path: tuple[Node, ...]
    readers: tuple[Node, ...]
    outermost: bool = False
    shared: Term | None = None
    cast: Term | None = None


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
        self._follow(collective)

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
        whys = (
            why_no_matmul(term.node)
            or why_cast(term.node)
            or why_uneven(term.node)
            or why_part(term.node)
            or why_trimmed_before(term.node)
            or _why_taken(term.node)
            for term in self
        )
        return next(filter(None, whys), "")

    def require_products(self, reduce_op: object) -> None:
        """Raise SkipError unless there is a product among the terms, and ops can reduce their sum in this way."""
        if not self.products:
            raise SkipError(self._why_none)
        if reduce_op not in ("sum", "avg"):
            raise SkipError(f"the reduction is {reduce_op!r}: 'sum' and 'avg' can be fused")

    @property
    def _why_none(self) -> str:
        """Why there is no product among the terms."""
        scaled = any(has_product(term.node, _SCALINGS) and not has_product(term.node, ()) for term in self)
        if not self.unknown and scaled:
            return "a product is multiplied or divided by something before it is reduced"
        batches = any(is_of_different_matrices(term.node) for term in self)
        return self.unknown or ("each matrix of a batch is multiplied by another one" if batches else NO_PRODUCT)

    @property
    def inputs(self) -> list[Node]:
        """The nodes that must be computed before the op."""
        return [node for term in self for node in term.inputs]

    def _follow(self, collective: Node) -> None:
        """Collect the terms that a collective's input is computed from, from left to right."""
        left = [_Found(collective.args[0], (), (collective,), outermost=True)]  # type: ignore[arg-type]
        while left:
            left += reversed(self._step(left.pop()))

    def _step(self, found: _Found) -> list[_Found]:
        """Add the term that a node is, or return the nodes that it is computed from."""
        node, path, shared, outermost = found.node, found.path, found.shared, found.outermost
        step, matmul = step_of(node), matmul_of(node)
        if step is not None and value(step.source).dtype != value(node).dtype:
            step = None  # the same bytes are other numbers, whose sum is another one
        through = () if step is None else step.through
        if shared is None and not _is_alone(node, found.readers, through):
            shared = Term(node, path)
        if step is not None and (shared is None or outermost or _is_product(step.source)):
            readers = (*through, node)
            return [_Found(step.source, (node, *path), readers, outermost, shared, found.cast)]
        if node.target is aten.add.Tensor and (shared is None or outermost) and is_plain_sum(node):
            if shared is not None:
                self.total = Term(node, path)
            return [_Found(operand, path, (node,)) for operand in node.args[:2]]  # type: ignore[arg-type]
        if shared is None and is_widening(node) and (outermost or self._adds_cast_product(node)):
            cast = found.cast
            if outermost:
                self.out_dtype = value(node).dtype
            else:
                cast = Term(node, path)
            return [_Found(node.args[0], (node, *path), (node,), outermost, None, cast)]  # type: ignore[arg-type]
        if matmul is not None:
            self.all.append(Product(node, path, shared, found.cast, matmul=matmul))
        else:
            self.all.append(shared or Term(node, path))
        return []

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
        first = min(self, key=lambda term: (term.shared or term.cast) is not None)
        place = place_in(first.node, first.path, world)
        for number, term in enumerate(self):
            if (term.shared or term.cast) is not None and not lies_at(place, term.node, term.path, world):
                self.all[number] = term = term.computed_before
            if not place_in(term.node, term.path, world).same(place):
                raise SkipError(
                    "the tensors that are added are scattered along different dimensions, or in other orders"
                )
        self._settle_casts()
        if self.total is not None and not lies_at(place, self.total.node, self.total.path, world):
            raise SkipError("the sum is used elsewhere too, in another arrangement than its terms")
        while (needed := self._first_needed()) is not None:
            self.all = [needed.shared or term if term is needed else term for term in self]
        return place

    def _settle_casts(self) -> None:
        """If a sum has products that are cast, and others, leave one kind to the op: those that are cast if they are
        more, else the others.

        Their number is the same on all ranks, but the size over which they are contracted may differ, and with it the
        time that they take. All ranks have to give the same products to the op.

        Raises:
            SkipError: all products are cast, and the sum is used elsewhere too, which the op does not return.
        """
        cast = [product for product in self.products if product.cast is not None]
        others = [product for product in self.products if product.cast is None]
        if not cast or not (others or self.total):
            return
        if not others:
            raise SkipError("products are cast before they are added, and the sum is used elsewhere too")
        given_up = cast if self.total is not None or len(others) >= len(cast) else others
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


def _is_product(node: Node) -> bool:
    """True if the node is a matmul, or rearranges one."""
    while (step := step_of(node)) is not None:
        node = step.source
    return matmul_of(node) is not None


def _is_scaled(term: Term) -> bool:
    return isinstance(term, Product) and term.matmul.scaled is not None


def _why_taken(node: Node) -> str:
    """Why a product is not computed by a matmul any more: two collectives reduce it, and the first has been fused."""
    return "the op of another collective returns it" if _KEPT in node.meta else ""


def mark_kept(node: Node) -> None:
    """Note that this node, or what it rearranges, is a product that an op returns beside its result."""
    source: Any = node
    while isinstance(source, Node) and source.target is not operator.getitem:
        source = next(iter(source.args), None)
    if isinstance(source, Node):
        source.meta[_KEPT] = True
