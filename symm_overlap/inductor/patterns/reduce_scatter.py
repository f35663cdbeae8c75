"""``reduce_scatter(sum of A @ B, "sum" or "avg", dim, group)``.

The sum may have any number of matmuls, each with a bias or without, and other tensors. Each may be viewed in any way,
and the sum may be scattered along any dimension, as long as every rank gets whole rows, or whole columns, of the
products.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch.fx import Graph, Node

from .._torch import known
from ..arrangement import Dimension, Size, atoms_of, of_shape, settled, size_of, take
from ..choices import Choices
from ..graph import Writer, aten, step_of, value
from ..matmul import Matmul, Scaled, matmul_of
from .pattern import SkipError, arranged, c10d, chosen_path, give_way, require_unwritten, results, writing


@dataclass(frozen=True)
class Term:
    """One tensor of the sum.

    Attributes:
        node: a matmul, or any other tensor.
        path: the nodes that rearrange it on its way to the collective.
        alone: whether nothing else uses it.
    """

    node: Node
    path: tuple[Node, ...]
    alone: bool

    @property
    def matmul(self) -> Matmul | None:
        """What it multiplies, unless the product is needed as it is."""
        return matmul_of(self.node) if self.alone else None


@dataclass(frozen=True)
class Place:
    """Where the scattered dimension lies in a matrix.

    Attributes:
        before, after: how many rows lie before it and after it; with ``last``, how many rows and columns.
        last: whether ranks get blocks of columns, and not of rows.
    """

    before: Size
    after: Size
    last: bool


class ReduceScatter:
    """See `Pattern`."""

    target = c10d.reduce_scatter_tensor.default
    path = ""

    def __init__(self, graph: Graph, node: Node, choices: Choices) -> None:
        self.graph, self.node, self.choices = graph, node, choices
        self.terms: list[Term] = []
        self.shared = False  # whether a term is a product, or a view of one, that is needed as it is
        self._follow(node.args[0], (), [node])  # type: ignore[arg-type]
        self.candidate = self.shared or any(term.matmul is not None for term in self.terms)

    def _follow(self, node: Node, path: tuple[Node, ...], readers: Iterable[Node]) -> None:
        """Collect the terms of a sum. What others than these readers use is a term as it is, since it has to be made
        anyway.
        """
        step = step_of(node)
        alone = set(node.users) <= set(readers)
        if step is not None and alone and all(set(part.users) <= {*step.through, node} for part in step.through):
            self._follow(step.source, (node, *path), (*step.through, node))
        elif node.target is aten.add.Tensor and alone and _is_plain_sum(node):
            for operand in node.args[:2]:
                self._follow(operand, path, [node])  # type: ignore[arg-type]
        else:
            term = Term(node, path, alone)
            self.terms.append(term)
            self.shared |= term.matmul is None and _is_product(node)

    def fuse(self) -> int:
        """See `Pattern.fuse`."""
        _, reduce_op, world, _ = self.node.args
        if not self.candidate:
            raise SkipError("no matmul makes what is reduced")
        if reduce_op not in ("sum", "avg"):
            raise SkipError(f"the reduction is {reduce_op!r}: 'sum' and 'avg' can be fused")
        products = [term.matmul for term in self.terms if term.matmul is not None]
        if not products:
            raise SkipError("the product is used elsewhere too, so it has to be made anyway")
        if len(self.terms) > 1 and any(product.scaled for product in products):
            raise SkipError("a scaled matmul is only one of the tensors that are added")
        old = results(self.node)
        require_unwritten(node for term in self.terms for node in (term.node, *term.path))
        require_unwritten(node for product in products for node in product.inputs)
        places = [_place(term, world) for term in self.terms]  # type: ignore[arg-type]
        place = places[0]
        for other in places[1:]:
            same = known(other.before == place.before) and known(other.after == place.after)
            if other.last != place.last or not same:
                raise SkipError("the tensors that are added are scattered along different dimensions")
        *rows, n = value(products[0].node).shape
        k = sum(value(product.left).shape[-1] for product in products)
        like = value(products[0].node)
        op = "scaled_matmul_reduce_scatter" if products[0].scaled else "matmul_reduce_scatter"
        self.path = chosen_path(self.choices, op, prod(rows), n, k, like, world, place.last)  # type: ignore[arg-type]
        with writing(self.graph, self.node) as write:
            output = self._written(write, place, products)
        give_way(self.graph, old, output)
        return len(products)

    def _written(self, write: Writer, place: Place, products: list[Matmul]) -> Node:
        _, reduce_op, world, group = self.node.args
        rows, dim = _rows(place, world)  # type: ignore[arg-type]
        if products[0].scaled is not None:
            output = self._scaled(write, products[0], products[0].scaled, rows, dim)
            return write.like(output, self.node)
        addend = None
        for term in self.terms:
            extra = term.node if term.matmul is None else term.matmul.bias
            if extra is not None:
                extra = _like_product(write, extra, products[0], rows)
                addend = extra if addend is None else write.call(aten.add.Tensor, addend, extra)
        output = write.op(
            "fused_matmuls_reduce_scatter",
            [write.reshape(product.left, [*rows, value(product.left).shape[-1]]) for product in products],
            [product.right for product in products],
            addend,
            reduce_op,
            dim,
            group,
        )
        return write.like(output, self.node)

    def _scaled(self, write: Writer, product: Matmul, scaled: Scaled, rows: list[Size], dim: int) -> Node:
        _, reduce_op, _, group = self.node.args
        of_left = scaled.left
        if not known(value(of_left).numel() == 1):  # one for every row
            of_left = write.reshape(of_left, [*rows, 1])
        left = write.reshape(product.left, [*rows, value(product.left).shape[-1]])
        shape = [*rows, value(product.right).shape[1]]
        return write.op(
            "fused_scaled_matmul_reduce_scatter",
            *(left, product.right, of_left, scaled.right, reduce_op, dim, dim, group, shape),
            *(product.bias, scaled.result, scaled.dtype, scaled.fast),
        )


def _is_product(node: Node) -> bool:
    """Whether it is a matmul, or rearranges one."""
    while (step := step_of(node)) is not None:
        node = step.source
    return matmul_of(node) is not None


def _is_plain_sum(node: Node) -> bool:
    """Whether it adds two tensors of one shape and dtype."""
    operands = node.args[:2]
    if node.kwargs.get("alpha", 1) != 1 or not all(isinstance(operand, Node) for operand in operands):
        return False
    values = [value(operand) for operand in (node, *operands)]  # type: ignore[arg-type]
    return all(one.shape == values[0].shape and one.dtype == values[0].dtype for one in values)


def _place(term: Term, world: int) -> Place:
    """Where the dimension that the collective scatters lies in a term."""
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
    """Where ``part`` begins in ``atoms``."""
    return next((at for at in range(len(atoms)) if atoms[at : at + len(part)] == part), None)


def _without(atoms: Dimension, part: Dimension) -> Dimension:
    return tuple(atom for atom in atoms if atom not in part)


def _rows(place: Place, world: int) -> tuple[list[Size], int]:
    """The rows of a product, as dimensions for the op, and the dimension that it scatters."""
    if place.last:
        return [place.before], 1
    if known(place.before == 1):
        return [world * place.after], 0
    return [place.before, world * place.after], 1


def _like_product(write: Writer, node: Node, product: Matmul, rows: list[Size]) -> Node:
    """A bias, or another term, with the rows of a product."""
    columns = value(product.right).shape[1]
    if value(node).dim() < value(product.node).dim() or not known(value(node).numel() == value(product.node).numel()):
        lead = [write.size(product.left, dim) for dim in range(value(product.left).dim() - 1)]
        shape = [*lead, write.size(product.right, 1)]
        node = write.call(aten.expand.default, node, shape)
    return write.reshape(node, [*rows, columns])
