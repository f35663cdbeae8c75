"""``reduce_scatter(sum of A @ B, "sum" or "avg", dim, group)``.

The sum may have any number of matmuls, each with a bias or without, and other tensors. Each may be viewed in any way,
and the sum may be scattered along any dimension, as long as every rank gets whole rows, or whole columns, of the
products.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

from torch.fx import Graph, Node

from .._torch import known
from ..arrangement import Size
from ..choices import Choices
from ..graph import Writer, aten, value
from ..matmul import Matmul, Scaled
from .pattern import SkipError, c10d, chosen_path, give_way, require_unwritten, results, writing
from .terms import Place, Product, Terms


class ReduceScatter:
    """See `Pattern`."""

    target = c10d.reduce_scatter_tensor.default
    path = ""

    def __init__(self, graph: Graph, node: Node, choices: Choices) -> None:
        self.graph, self.node, self.choices = graph, node, choices
        self.terms = Terms(node)
        self.candidate = bool(self.terms.products)

    def fuse(self) -> int:
        """See `Pattern.fuse`."""
        _, reduce_op, world, _ = self.node.args
        terms = self.terms
        if not self.candidate:
            raise SkipError("no matmul makes what is reduced")
        if reduce_op not in ("sum", "avg"):
            raise SkipError(f"the reduction is {reduce_op!r}: 'sum' and 'avg' can be fused")
        if len(terms) > 1 and all(term.matmul.scaled for term in terms.products):
            raise SkipError("a scaled matmul is only one of the tensors that are added")
        old = results(self.node)
        require_unwritten(node for term in terms for node in (term.node, *term.path))
        require_unwritten(node for term in terms.products for node in term.inputs)
        place = terms.settle(world)  # type: ignore[arg-type]
        if not terms.products:
            raise SkipError("the product is used elsewhere too, also by what it is added to")
        products = [term.matmul for term in terms.products]
        self.path = self._path(place, products)
        with writing(self.graph, self._position()) as write:
            new = self._written(write, place, products)
        give_way(self.graph, old, new.pop(self.node))
        for node, replacement in new.items():
            node.replace_all_uses_with(replacement)
        return len(products)

    def _path(self, place: Place, products: list[Matmul]) -> str:
        like = value(products[0].node)
        *rows, n = like.shape
        k = sum(value(product.left).shape[-1] for product in products)
        op = "scaled_matmul_reduce_scatter" if products[0].scaled else "matmul_reduce_scatter"
        world: int = self.node.args[2]  # type: ignore[assignment]
        return chosen_path(self.choices, op, prod(rows), n, k, like, world, place.last)

    @property
    def _kept(self) -> list[Node]:
        """The products that something else uses, and the sum, if it is."""
        kept = [term.node for term in self.terms.products if term.shared]
        return kept if self.terms.total is None else [*kept, self.terms.total.node]

    def _position(self) -> Node:
        """Ahead of which node the op is written: where its first kept result was made, if that can be, so that those
        who use it may stay where they are.
        """
        if not self._kept:
            return self.node
        position = {node: number for number, node in enumerate(self.graph.nodes)}
        earliest = min(self._kept, key=position.__getitem__)
        return max([earliest, *self.terms.inputs], key=position.__getitem__).next

    def _written(self, write: Writer, place: Place, products: list[Matmul]) -> dict[Node, Node]:
        """What takes the place of the collective, and of what is used elsewhere."""
        _, reduce_op, world, group = self.node.args
        rows, dim = _rows(place, world)  # type: ignore[arg-type]
        if products[0].scaled is not None:
            return self._written_scaled(write, products[0], products[0].scaled, rows, dim)
        arguments = (
            [write.reshape(product.left, [*rows, value(product.left).shape[-1]]) for product in products],
            [product.right for product in products],
            self._addend(write, products, rows),
            reduce_op,
            dim,
            group,
        )
        if not self._kept:
            output = write.op("fused_matmuls_reduce_scatter", *arguments)
            return {self.node: write.like(output, self.node)}
        return self._written_with_kept(write, arguments)

    def _addend(self, write: Writer, products: list[Matmul], rows: list[Size]) -> Node | None:
        """Everything in the sum but the products."""
        addend = None
        for term in self.terms:
            extra = term.matmul.bias if isinstance(term, Product) else term.node
            if extra is not None:
                extra = _like_product(write, extra, products[0], rows)
                addend = extra if addend is None else write.call(aten.add.Tensor, addend, extra)
        return addend

    def _written_with_kept(self, write: Writer, arguments: tuple[Any, ...]) -> dict[Node, Node]:
        products, total = self.terms.products, self.terms.total
        if total is None and len(self.terms) == 1 and products[0].matmul.bias is not None:
            total = products[0]  # with its bias it is the sum
        kept = {term.node: index for index, term in enumerate(products) if term.shared and term is not total}
        op = write.op(
            "fused_matmuls_reduce_scatter_keep", *arguments, keep=list(kept.values()), keep_sum=total is not None
        )
        new = {self.node: write.like(write.call(operator.getitem, op, 0), self.node)}
        made = write.call(operator.getitem, op, 1)
        for number, (node, index) in enumerate(kept.items()):
            product, bias = write.like(write.call(operator.getitem, made, number), node), products[index].matmul.bias
            new[node] = product if bias is None else write.call(aten.add.Tensor, product, bias)
        if total is not None:
            new[total.node] = write.like(write.call(operator.getitem, op, 2), total.node)
        return new

    def _written_scaled(
        self, write: Writer, product: Matmul, scaled: Scaled, rows: list[Size], dim: int
    ) -> dict[Node, Node]:
        _, reduce_op, _, group = self.node.args
        of_left = scaled.left
        if not known(value(of_left).numel() == 1):  # one for every row
            of_left = write.reshape(of_left, [*rows, 1])
        left = write.reshape(product.left, [*rows, value(product.left).shape[-1]])
        arguments = (
            *(left, product.right, of_left, scaled.right, reduce_op, dim, dim, group, None),
            *(product.bias, scaled.result, scaled.dtype, scaled.fast),
        )
        if not self._kept:
            return {self.node: write.like(write.op("fused_scaled_matmul_reduce_scatter", *arguments), self.node)}
        both = write.op("fused_scaled_matmul_reduce_scatter_keep", *arguments)
        made = {
            node: write.call(operator.getitem, both, number) for number, node in enumerate((self.node, product.node))
        }
        return {node: write.like(each, node) for node, each in made.items()}


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
