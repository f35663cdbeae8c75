"""Match ``all_reduce(sum of (A @ B [+ bias]).view(...), "sum" or "avg", group)``.

A single product that nothing else uses, and a sum of such products and other tensors, have ops of their own. Any other
sum (of scaled matmuls, of products that are cast, or of products that something else uses too) is first scattered as in
`reduce_scatter`, and then the parts are gathered. An all-reduce moves as many bytes, or more if products are cast.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from math import prod

from torch import Tensor
from torch.fx import Graph, Node

from ...collective.dispatch.registration import size_of_group
from .._torch import known
from ..arrangement import atoms_of, of_shape
from ..choices import Choices
from ..graph import aten, value
from ..matmul import Matmul, column_biases
from ..moved import of_all_reduce
from ..writer import Writer
from .order import Order
from .pattern import SkipError, arranged, c10d, choice_of, give_way, path_of, require_unwritten, results, writing
from .reduce_scatter import ReduceScatter, addend_of
from .terms import Product, Terms


class AllReduce:
    """See `Pattern`."""

    target = c10d.all_reduce.default
    path = ""

    def __init__(self, graph: Graph, node: Node, choices: Choices) -> None:
        self.graph, self.node, self.choices = graph, node, choices
        self.terms = Terms(node)
        self.world = size_of_group(node.args[2])  # type: ignore[arg-type]
        whole = value(node)
        self.moved = of_all_reduce(whole.numel(), 1, whole.element_size(), self.world)
        self.candidate = bool(self.terms.products)

    def fuse(self) -> int:
        """See `Pattern.fuse`."""
        reduce_op = self.node.args[1]
        if not self.candidate:
            self.candidate = bool(self.terms.unknown)
        self.terms.require_products(reduce_op)
        old = results(self.node)
        if self._needs_two:
            return self._in_two(old)
        order, (term, *others) = self._order(), self.terms
        if others or not isinstance(term, Product):
            return self._sum_in_one(old, order)
        self._in_one(old, term.matmul, order)
        return 1

    @property
    def _needs_two(self) -> bool:
        """True if no single op computes and reduces the sum."""
        terms, products = self.terms, self.terms.products
        other = any(product.shared or product.cast or product.matmul.scaled for product in products)
        return other or terms.total is not None or terms.out_dtype is not None

    def _order(self) -> Order:
        """Return the order in which the elements of the sum are reduced.

        Raises:
            SkipError: the terms cannot be added as they lie.
        """
        widths = [value(product.matmul.right).shape[1] for product in self.terms.products]
        if not all(known(width == widths[0]) for width in widths):
            raise SkipError("the products that are added have different numbers of columns, as far as is known")
        orders: list[Order] = []
        for term in self.terms:
            require_unwritten([*term.inputs, term.node, *term.path])
            start = of_shape(value(term.node).shape)
            reduced = atoms_of(arranged(start, term.path))
            orders.append(Order.between(atoms_of(start), reduced))
            if not orders[0].same(orders[-1]):
                raise SkipError("the tensors that are added have their elements in different orders")
        return orders[0]

    def _in_one(self, old: list[Node], matmul: Matmul, order: Order) -> None:
        reduce_op, group = self.node.args[1], str(self.node.args[2])
        (*rows, k), n = value(matmul.left).shape, value(matmul.right).shape[1]
        like, m = value(matmul.left), prod(rows)
        choice = choice_of(self.choices, "matmul_all_reduce", m, n, k, like, group)
        self.path = path_of(self.choices, choice)
        moved = of_all_reduce(m, n, like.element_size(), self.world, choice)
        with writing(self.graph, self.node) as write:
            factors = matmul.left, matmul.right
            output = write.op("fused_matmul_all_reduce", *factors, reduce_op, group, matmul.column_bias)
            if (bias := matmul.other_bias) is not None:
                # It is reduced by itself, because every rank may have a different bias.
                moved = self._with_bias(moved, value(bias), group)
                output = write.call(aten.add.Tensor, output, write.op("all_reduce", bias, reduce_op, group))
            output = write.like(order.of(write, output), self.node)
        give_way(self.graph, old, output)
        self.moved = moved

    def _sum_in_one(self, old: list[Node], order: Order) -> int:
        reduce_op, group = self.node.args[1], str(self.node.args[2])
        products = [product.matmul for product in self.terms.products]
        like, n = value(products[0].left), value(products[0].right).shape[1]
        m, k = prod(value(products[0].node).shape[:-1]), sum(value(product.right).shape[0] for product in products)
        choice = choice_of(self.choices, "matmul_all_reduce", m, n, k, like, group, one_matmul=False)
        self.path = path_of(self.choices, choice)
        with writing(self.graph, self.node) as write:
            lefts = [write.reshape(product.left, [m, value(product.left).shape[-1]]) for product in products]
            rights = [product.right for product in products]
            addend = addend_of(write, self.terms, [m])
            more = [] if (biases := column_biases(write, products)) is None else [biases]
            output = write.op("fused_matmuls_all_reduce", lefts, rights, addend, reduce_op, group, *more)
            output = write.like(order.of(write, output), self.node)
        give_way(self.graph, old, output)
        self.moved = of_all_reduce(m, n, like.element_size(), self.world, choice)
        return len(products)

    def _with_bias(self, others: int | None, bias: Tensor, group: str) -> int | None:
        """Return the bytes moved, including those for a bias that is reduced by itself."""
        rows, columns = prod(bias.shape[:-1]), bias.shape[-1] if bias.dim() else 1
        choice = choice_of(self.choices, "all_reduce", rows, columns, 0, bias, group)
        moved = of_all_reduce(rows, columns, bias.element_size(), self.world, choice)
        return None if moved is None or others is None else others + moved

    def check(self) -> None:
        """Raise SkipError if no ops compute and reduce this sum."""
        if not self._needs_two:
            self._order()
            return
        whole = self.node.args[0]
        assert isinstance(whole, Node)
        for way in _ways_to_share(whole, self.world):
            with suppress(SkipError), writing(self.graph, self.node) as write:
                rows, _ = _in_rank_order(write, whole, self.world, way)
                collective = write.call(ReduceScatter.target, rows, self.node.args[1], self.world, self.node.args[2])
                self.node.update_arg(0, collective)  # for now, so that this node does not use the tensor any more
                try:
                    ReduceScatter(self.graph, collective, self.choices).check()
                finally:
                    self.node.update_arg(0, whole)
                write.undo()
                return
        raise SkipError(self._uneven)

    @property
    def _uneven(self) -> str:
        return (
            "a scaled product, or one that is cast or used elsewhere too, can be fused only if the ranks can share the "
            f"rows evenly, and {self.world} ranks cannot, as far as is known"
        )

    def _in_two(self, old: list[Node]) -> int:
        """Write a reduce-scatter, which is fused, and an all-gather of the sums. Return the number of matmuls."""
        whole = self.node.args[0]
        assert isinstance(whole, Node)
        skipped = SkipError(self._uneven)
        for way in _ways_to_share(whole, self.world):
            try:
                return self._shared(old, whole, way)
            except SkipError as error:
                skipped = error
        raise skipped

    def _shared(self, old: list[Node], whole: Node, way: int | None) -> int:
        """Do the same, where the ranks share ``whole`` in a given way; see `_ways_to_share`."""
        _, reduce_op, group = self.node.args
        with writing(self.graph, self.node) as write:
            rows, dim = _in_rank_order(write, whole, self.world, way)
            collective = write.call(ReduceScatter.target, rows, reduce_op, self.world, group)
            part = write.call(c10d.wait_tensor.default, collective)
            output = write.like(write.op("all_gather", part, dim, group), self.node)
            self.node.update_arg(0, output)  # for now, so that this node does not use the scattered tensor any more
            scattered = ReduceScatter(self.graph, collective, self.choices)
            gathered = scattered.moved
            try:
                matmuls = scattered.fuse()
            except SkipError:
                self.node.update_arg(0, whole)
                raise
        self.path = scattered.path
        self.moved = None if scattered.moved is None or gathered is None else scattered.moved + gathered
        give_way(self.graph, old, output)
        return matmuls


def _ways_to_share(whole: Node, world: int) -> list[int | None]:
    """Return the ways in which the ranks can share the rows of a tensor evenly, the best one first: None if each rank
    takes a block of all rows, or a dimension that is divided.
    """
    lead = value(whole).shape[:-1]
    dims = [dim for dim, size in enumerate(lead) if dim > 0 and known(size % world == 0) and not known(size == 0)]
    return [None, *dims] if known(prod(lead) % world == 0) else list(dims)


def _in_rank_order(write: Writer, whole: Node, world: int, way: int | None) -> tuple[Node, int]:
    """Return the tensor reordered so that its first dimension can be scattered, and the dimension that this divides."""
    if way is None:
        *lead, columns = value(whole).shape
        return write.reshape(whole, [prod(lead), columns]), 0
    size = write.size(whole, way)
    size = write.call(operator.floordiv, size, world) if isinstance(size, Node) else size // world
    chunks = write.call(aten.split.Tensor, whole, size, way)
    return write.call(aten.cat.default, [write.call(operator.getitem, chunks, rank) for rank in range(world)]), way
