"""The terms that are added on this rank before a reduce-scatter. Each is rearranged on its way to the collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .._torch import known
from ..arrangement import Dimension, Size, atoms_of, of_shape, settled, size_of, take
from ..graph import aten, step_of, value
from ..matmul import Matmul, matmul_of, why_no_matmul
from .cast_first import is_cast
from .pattern import SkipError, ancestors, arranged

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
    """

    node: Node
    path: tuple[Node, ...]
    shared: Term | None = None

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
    """

    def __init__(self, collective: Node) -> None:
        self.all: list[Term] = []
        self.total: Term | None = None
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
    def unknown(self) -> str:
        """Why matmuls among the terms cannot be replaced; empty if there are none."""
        return next(filter(None, (why_no_matmul(term.node) or _why_cast(term.node) for term in self)), "")

    @property
    def why_none(self) -> str:
        """Why there is no product among the terms."""
        if not self.unknown and any(_has_product(term.node, _SCALINGS) for term in self):
            return "a product is multiplied or divided by something before it is reduced"
        return self.unknown or NO_PRODUCT

    @property
    def inputs(self) -> list[Node]:
        """The nodes that must be computed before the op."""
        return [node for term in self for node in term.inputs]

    def _follow(
        self, node: Node, path: tuple[Node, ...], readers: Iterable[Node], shared: Term | None, outermost: bool
    ) -> None:
        """Collect the terms that a node is computed from.

        Args:
            path: the nodes from this node to the collective.
            readers: the users of the node on that path.
            shared: among the nodes so far, the one nearest to the collective that is used elsewhere too.
            outermost: whether the node is the whole sum.
        """
        step, matmul = step_of(node), matmul_of(node)
        through = () if step is None else step.through
        alone = set(node.users) <= set(readers) and all(set(part.users) <= {*through, node} for part in through)
        if shared is None and not alone:
            shared = Term(node, path)
        if step is not None and (shared is None or outermost or _is_product(step.source)):
            self._follow(step.source, (node, *path), (*through, node), shared, outermost)
        elif node.target is aten.add.Tensor and (shared is None or outermost) and _is_plain_sum(node):
            if shared is not None:
                self.total = Term(node, path)
            for operand in node.args[:2]:
                self._follow(operand, path, [node], None, outermost=False)  # type: ignore[arg-type]
        elif matmul is not None:
            self.all.append(Product(node, path, shared, matmul=matmul))
        else:
            self.all.append(shared or Term(node, path))

    def settle(self, world: int) -> Place:
        """Return the position of the scattered dimension, which must be the same in every term and in the sum.

        A product that the op cannot compute together with the others becomes an ordinary term, which is computed before
        the op. This applies to scaled products in a sum with other matmuls. It also applies to a product that is used
        elsewhere, if it has another layout than the others, or if another term depends on it.

        Raises:
            SkipError: there is no such position.
        """
        if not all(map(_is_scaled, self.products)):
            self.all = [term.shared or Term(term.node, term.path) if _is_scaled(term) else term for term in self]
        place = _place(min(self, key=lambda term: term.shared is not None), world)
        for number, term in enumerate(self):
            if term.shared is not None and not _lies_at(place, term, world):
                self.all[number] = term = term.shared
            if not _place(term, world).same(place):
                raise SkipError("the tensors that are added are scattered along different dimensions")
        if self.total is not None and not _lies_at(place, self.total, world):
            raise SkipError("the sum is used elsewhere too, in another arrangement than its terms")
        while (needed := self._first_needed()) is not None:
            self.all = [needed.shared or term if term is needed else term for term in self]
        return place

    def _first_needed(self) -> Term | None:
        """Return the first product that is used elsewhere and that another term depends on, or None."""
        if not any(term.shared for term in self):
            return None
        behind = ancestors(self.inputs)
        return next((term for term in self if term.shared and term.node in behind), None)


def _why_cast(node: Node) -> str:
    """Return why a product, or a sum with one, that is cast before it is reduced cannot be fused; empty for others."""
    if not is_cast(node) or not _has_product(node, ()):
        return ""
    dtype, own = value(node).dtype, value(node.args[0]).dtype  # type: ignore[arg-type]
    return (
        f"a product is cast to {dtype} before it is reduced, and the op returns sums of {own}: multiply {dtype}, or "
        f"reduce {own} and cast afterwards"
    )


def _has_product(node: Node, scalings: tuple[Any, ...]) -> bool:
    """True if a node is computed from a matmul by rearranging, adding, casting and ``scalings`` alone."""
    seen, left = {node}, [node]
    while left:
        each = left.pop()
        if matmul_of(each) is not None:
            return True
        step = step_of(each)
        if step is not None:
            sources = [step.source]
        elif is_cast(each) or each.target in (*scalings, aten.add.Tensor):
            sources = each.all_input_nodes
        else:
            continue
        left += [source for source in sources if source not in seen]
        seen.update(sources)
    return False


def _is_product(node: Node) -> bool:
    """True if the node is a matmul, or rearranges one."""
    while (step := step_of(node)) is not None:
        node = step.source
    return matmul_of(node) is not None


def _is_scaled(term: Term) -> bool:
    return isinstance(term, Product) and term.matmul.scaled is not None


def _is_plain_sum(node: Node) -> bool:
    """True if the node adds two tensors of one shape and dtype."""
    operands = node.args[:2]
    if node.kwargs.get("alpha", 1) != 1 or not all(isinstance(operand, Node) for operand in operands):
        return False
    values = [value(operand) for operand in (node, *operands)]  # type: ignore[arg-type]
    return all(one.shape == values[0].shape and one.dtype == values[0].dtype for one in values)


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
