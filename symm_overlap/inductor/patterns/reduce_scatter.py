"""Match ``reduce_scatter(sum of A @ B, "sum" or "avg", dim, group)``.

The sum may have any number of matmuls, each with or without a bias, and other tensors. Each term may be viewed and
permuted in any way, and the sum may be scattered along any dimension, as long as every rank gets whole rows, or whole
columns, of the products. Products in half precision, or their sum, may be cast to float32 on the way, as autocast does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch import known
from ..arrangement import Size
from ..choices import Choices
from ..graph import aten, value
from ..matmul import Matmul, column_biases
from ..moved import of_parts
from ..writer import Writer
from .order import Order
from .pattern import (
    SkipError,
    c10d,
    choice_of,
    draws_between,
    give_way,
    path_of,
    positions,
    require_unwritten,
    results,
    writing,
)
from .place import Place
from .terms import Product, Terms, mark_kept


class ReduceScatter:
    """See `Pattern`."""

    target = c10d.reduce_scatter_tensor.default
    path = ""

    def __init__(self, graph: Graph, node: Node, choices: Choices) -> None:
        self.graph, self.node, self.choices = graph, node, choices
        self.terms = Terms(node)
        self.moved = of_parts(value(node), node.args[2])  # type: ignore[arg-type]
        self.candidate = bool(self.terms.products)

    def fuse(self) -> int:
        """See `Pattern.fuse`."""
        _, reduce_op, world, _ = self.node.args
        terms = self.terms
        if not self.candidate:
            self.candidate = bool(self.terms.unknown)
        self.terms.require_products(reduce_op)
        old = results(self.node)
        place = self.check()
        products = [term.matmul for term in terms.products]
        self.path = self._path(place, products)
        with writing(self.graph, self._position()) as write:
            new = self._written(write, place, products)
        if terms.out_dtype is not None:
            self.moved = of_parts(value(self.node), world, value(products[0].node))  # type: ignore[arg-type]
        give_way(self.graph, old, new.pop(self.node))
        for node, replacement in new.items():
            node.replace_all_uses_with(replacement)
            mark_kept(replacement)
        return len(products)

    def check(self) -> Place:
        """Return where the scattered dimension is in the products.

        Raises:
            SkipError: no op computes this sum.
        """
        terms = self.terms
        require_unwritten(node for term in terms for node in (term.node, *term.path))
        require_unwritten(node for term in terms.products for node in term.inputs)
        place = terms.settle(self.node.args[2])  # type: ignore[arg-type]
        if not terms.products:
            raise SkipError("the product is used elsewhere too, also by a tensor that it is added to")
        if self._kept and terms.out_dtype:
            raise SkipError("a product is cast before it is reduced, and is used elsewhere too")
        if terms.products[0].matmul.scaled and terms.out_dtype:
            raise SkipError("the product of a scaled matmul is cast before it is reduced")
        self._position()
        return place

    def _path(self, place: Place, products: list[Matmul]) -> str:
        like = value(products[0].node)
        *rows, n = like.shape
        k = sum(value(product.left).shape[-1] for product in products)
        op = "scaled_matmul_reduce_scatter" if products[0].scaled else "matmul_reduce_scatter"
        group: str = self.node.args[3]  # type: ignore[assignment]
        # The op describes its problem in the same way: nothing is added to the product, and the product is not kept.
        alone = len(self.terms) == 1 and not self._kept and products[0].other_bias is None
        sizes = prod(rows), n, k
        choice = choice_of(
            self.choices, op, *sizes, like, group, last_dim=place.last, one_matmul=alone, dtype=self.terms.sum_dtype
        )
        return path_of(self.choices, choice)

    @property
    def _kept(self) -> list[Node]:
        """The products that something else uses too, and the sum if something else uses it."""
        kept = [term.node for term in self.terms.products if term.shared]
        return kept if self.terms.total is None else [*kept, self.terms.total.node]

    def _position(self) -> Node:
        """Return the node before which the op is written. This is where its first kept result was computed, if all
        inputs exist there, so that the users of this result need not move.
        """
        if not self._kept:
            return self.node
        position = positions(self.graph)
        earliest = min(self._kept, key=position.__getitem__)
        last = max([earliest, *self.terms.inputs], key=position.__getitem__)
        if draws_between(position, earliest, last):
            raise SkipError("something else uses a product, and random numbers would be drawn in another order")
        return last.next

    def _written(self, write: Writer, place: Place, products: list[Matmul]) -> dict[Node, Node]:
        """Write the op. Return the new nodes for the collective, and for the products and sum that others use."""
        _, reduce_op, world, group = self.node.args
        rows, dim = _rows(place, world)  # type: ignore[arg-type]
        lefts = [write.reshape(product.left, [*rows, value(product.left).shape[-1]]) for product in products]
        rights = [product.right for product in products]
        common = addend_of(write, self.terms, rows), reduce_op, dim, group
        scaled = [product.scaled for product in products if product.scaled is not None]
        if not scaled:
            dtypes = {"sum_dtype": self.terms.sum_dtype, "out_dtype": self.terms.out_dtype}
            given = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
            biases = column_biases(write, products)
            more = [] if biases is None else [biases]
            op = "fused_matmuls_reduce_scatter"
            return self._written_as(write, place.order, op, lefts, rights, *common, *more, **given)
        return self._written_as(
            write,
            place.order,
            "fused_scaled_matmuls_reduce_scatter",
            *(lefts, rights, [_scales_of_rows(write, each.left, rows) for each in scaled]),
            [each.right for each in scaled],
            [product.bias for product in products],
            [each.result for each in scaled],
            *common,
            value(products[0].node).dtype,
            [each.fast for each in scaled],
        )

    def _written_as(
        self, write: Writer, order: Order, op: str, *arguments: Any, **dtypes: torch.dtype
    ) -> dict[Node, Node]:
        """Write the op. If a product or the sum is used elsewhere, write the op that also returns these."""
        if not self._kept:
            return {self.node: write.like(order.of(write, write.op(op, *arguments, **dtypes)), self.node)}
        products, total = self.terms.products, self.terms.total
        if total is None and len(self.terms) == 1 and products[0].matmul.other_bias is not None:
            total = products[0]  # the product with its bias is the sum
        kept = {term.node: index for index, term in enumerate(products) if term.shared and term is not total}
        made = write.op(f"{op}_keep", *arguments, keep=list(kept.values()), keep_sum=total is not None)
        new = {self.node: write.like(order.of(write, write.call(operator.getitem, made, 0)), self.node)}
        whole = write.call(operator.getitem, made, 1)
        for number, (node, index) in enumerate(kept.items()):
            product = write.like(write.call(operator.getitem, whole, number), node)
            bias = products[index].matmul.other_bias
            new[node] = product if bias is None else write.call(aten.add.Tensor, product, bias)
        if total is not None:
            new[total.node] = write.like(write.call(operator.getitem, made, 2), total.node)
        return new


def addend_of(write: Writer, terms: Terms, rows: Sequence[Size]) -> Node | None:
    """Return the sum of all terms other than the products, and of biases that the op does not add, or None.

    Args:
        rows: the dimensions of its rows.
    """
    addend, columns = None, value(terms.products[0].matmul.right).shape[1]
    for term in terms:
        extra = term.matmul.other_bias if isinstance(term, Product) else term.node
        if extra is not None:
            if isinstance(term, Product):
                extra = _expanded(write, extra, term.matmul)
            extra = write.reshape(extra, [*rows, columns])
            addend = extra if addend is None else write.call(aten.add.Tensor, addend, extra)
    return addend


def _rows(place: Place, world: int) -> tuple[list[Size], int]:
    """Return the row dimensions of a product as the op needs them, and the dimension that the op scatters."""
    if place.last:
        return [place.before], 1
    if known(place.before == 1):
        return [world * place.after], 0
    return [place.before, world * place.after], 1


def _scales_of_rows(write: Writer, scale: Node, rows: list[Size]) -> Node:
    """Return the scale of the matrix on the left in the shape of its rows: one number, or one for each row."""
    return scale if known(value(scale).numel() == 1) else write.reshape(scale, [*rows, 1])


def _expanded(write: Writer, bias: Node, product: Matmul) -> Node:
    """Return the bias of a product with as many elements as the product."""
    if known(value(bias).numel() == value(product.node).numel()):
        return bias
    lead = [write.size(product.left, dim) for dim in range(value(product.left).dim() - 1)]
    return write.call(aten.expand.default, bias, [*lead, write.size(product.right, 1)])
