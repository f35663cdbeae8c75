"""``all_reduce((A @ B [+ bias]).view(...), "sum" or "avg", group)``."""

from __future__ import annotations

from math import prod

from torch.fx import Graph, Node

from ...collective.registration import size_of_group
from ..arrangement import atoms_of, of_shape
from ..choices import Choices
from ..graph import aten, step_of, value
from ..matmul import matmul_of
from .pattern import SkipError, arranged, c10d, chosen_path, give_way, require_unwritten, results, writing


class AllReduce:
    """See `Pattern`."""

    target = c10d.all_reduce.default
    path = ""

    def __init__(self, graph: Graph, node: Node, choices: Choices) -> None:
        self.graph, self.node, self.choices = graph, node, choices
        # From what makes the tensor to the tensor: the nodes that rearrange it.
        self.route: list[Node] = [node.args[0]]  # type: ignore[list-item]
        while (step := step_of(self.route[0])) is not None and not step.through:
            self.route.insert(0, step.source)
        self.matmul = matmul_of(self.route[0])
        self.candidate = self.matmul is not None

    def fuse(self) -> int:
        """See `Pattern.fuse`."""
        matmul, route = self.matmul, self.route
        _, reduce_op, group = self.node.args
        if matmul is None:
            raise SkipError("no matmul makes what is reduced")
        if matmul.scaled is not None:
            raise SkipError("the matmul is a scaled one, for which there is no op")
        if reduce_op not in ("sum", "avg"):
            raise SkipError(f"the reduction is {reduce_op!r}: 'sum' and 'avg' can be fused")
        if any(len(node.users) > 1 for node in route):
            raise SkipError("the product is used elsewhere too, so it has to be made anyway")
        old = results(self.node)
        require_unwritten([*route, matmul.left, matmul.right])
        start = of_shape(value(matmul.node).shape)
        if atoms_of(arranged(start, route[1:])) != atoms_of(start):
            raise SkipError("the product's elements are put into another order before they are reduced")
        (*rows, k), n = value(matmul.left).shape, value(matmul.right).shape[1]
        world = size_of_group(group)  # type: ignore[arg-type]
        self.path = chosen_path(self.choices, "matmul_all_reduce", prod(rows), n, k, value(matmul.left), world)
        with writing(self.graph, self.node) as write:
            # Of another shape the bias is summed by itself; every rank may have its own.
            apart = matmul.bias is not None and value(matmul.bias).shape != value(matmul.right).shape[1:]
            bias = None if apart else matmul.bias
            output = write.op("fused_matmul_all_reduce", matmul.left, matmul.right, reduce_op, group, bias)
            if apart:
                bias = write.op("all_reduce", matmul.bias, reduce_op, group)
                output = write.call(aten.add.Tensor, output, bias)
            output = write.like(output, self.node)
        give_way(self.graph, old, output)
        return 1
