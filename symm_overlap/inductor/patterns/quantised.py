"""An all-gather whose result is quantised to float8 for a scaled matmul. Every rank quantises its shard first, so that
float8 is sent.

Quantising changes each number by itself, with a scale that is computed from the maximum of its row or of the whole
tensor. The rank that has a row knows the maximum of the row. For the whole tensor, the maximum of each rank's shard is
gathered, and the largest of these is used. Every bit stays the same, also for NaN.

A scale from any other source may differ between ranks, so it prevents this rewrite. Constants in the program are
assumed to be the same on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch import known
from ..arrangement import Arrangement, settled
from ..graph import Step, aten, is_tensor, same_shape, step_of, value
from ..matmul import matmul_of
from .gathered import Gathered
from .pattern import SkipError, require_unwritten

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST: dict[Any, Any] = {  # the result does not depend on the order of the numbers
    aten.amax.default: aten.amax.default,
    aten.max.default: aten.amax.default,
    aten.amin.default: aten.amin.default,
    aten.min.default: aten.amin.default,
}
MOVED_FIRST = "symm_overlap bytes moved first"
"""The key in a float8 gather's ``meta`` for the bytes moved to gather the maxima, from which scales are computed."""
_CONSTANTS = (aten.full.default, aten.scalar_tensor.default)


class Quantised:
    """A gathered tensor that is quantised.

    Attributes:
        results: the float8 tensors that are computed from it for scaled matmuls.
        gathered: the gathered tensor.
        numbers: the nodes computed elementwise from the gathered tensor, and its own nodes first, with arrangements.
        rows: the nodes with one number for each row, with their arrangements.
        same: nodes with a single number that is the same on every rank.
        largest: the nodes of ``rows`` and ``same`` that are the maximum, or the minimum, of one of ``numbers``.
        steps: how some of these nodes rearrange others.
        reason: why the shard cannot be quantised first; empty if it can be.
    """

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        self.gathered = Gathered(node)
        self.results = _float8_from(self.gathered)
        self.numbers = {each: of for each, of in self.gathered.nodes.items() if _same_dtype(each, node)}
        self.rows: dict[Node, Arrangement] = {}
        self.same: set[Node] = set()
        self.largest: list[Node] = []
        self.steps: dict[Node, Step] = {}
        self.reason = self._reason() if self.results and self.numbers else ""

    def _reason(self) -> str:
        self._collect()
        if not self.results <= self.numbers.keys():
            return (
                "it is quantised with a scale that is not computed from the maximum of each row or of the whole tensor"
            )
        inside = {*self.numbers, *self.largest, *self.gathered.involved}
        inside.update(node for step in self.steps.values() for node in step.through)
        if any(user not in inside for node in inside - self.results - {*self.largest} for user in node.users):
            return "something else uses it before it is quantised"
        try:
            require_unwritten([self.gathered.shard, *inside])
        except SkipError as skipped:
            return str(skipped)
        return ""

    def _collect(self) -> None:
        """Classify the nodes that are computed from the gathered tensor, in the order of the graph."""
        for node in self.graph.nodes:
            if node in self.numbers or node.op != "call_function" or not is_tensor(node):
                continue
            step = step_of(node)
            if node.target in _CONSTANTS and _is_one(node):
                self.same.add(node)
            elif node.target in LARGEST:
                self._add_largest(node)
            elif step is not None:
                self._add_step(node, step)
            elif _is_pointwise(node):
                self._add_pointwise(node)

    def _add_largest(self, node: Node) -> None:
        source: Any = node.args[0]
        if source in self.same or (source in self.rows and _is_one(node)):
            self.same.add(node)
        if source not in self.numbers or source in self.results:
            return
        arrangement = settled(self.numbers[source])
        given: Any = node.args[1] if len(node.args) > 1 else ()
        dims = {dim % len(arrangement) for dim in given}
        if _is_one(node):
            self.same.add(node)
        elif [atom for dim in sorted(dims) for atom in arrangement[dim]] == self._columns():
            keep = len(node.args) > 2 and bool(node.args[2])
            left = [() if dim in dims else atoms for dim, atoms in enumerate(arrangement) if keep or dim not in dims]
            self.rows[node] = tuple(left)
        else:
            return
        self.largest.append(node)

    def _columns(self) -> list[Any]:
        """Return the atoms of a row of the shard."""
        return list(settled(self.gathered.nodes[self.node])[-1]) if value(self.node).dim() > 1 else []

    def _add_step(self, node: Node, step: Step) -> None:
        for arrangements in (self.numbers, self.rows):
            if step.source in arrangements and step.source not in self.results:
                found = step.arrange(arrangements[step.source])
                if found is not None and _same_dtype(node, step.source):
                    arrangements[node] = found
                    self.steps[node] = step
        if step.source in self.same and _is_one(node):
            self.same.add(node)

    def _add_pointwise(self, node: Node) -> None:
        inputs = node.all_input_nodes
        wide = [each for each in inputs if each in self.numbers]
        rows = [each for each in inputs if each in self.rows]
        if not inputs or any(each not in self.same for each in inputs if each not in wide and each not in rows):
            return
        if any(each in self.results for each in wide) or any(value(each).dim() > self._dims() for each in inputs):
            return
        if not wide and not rows:
            if _is_one(node):
                self.same.add(node)
            return
        arrangements = self.numbers if wide else self.rows
        first = settled(arrangements[(wide or rows)[0]])
        of_wide = all(settled(self.numbers[each]) == first for each in wide)
        lead = first[:-1] if wide else first
        of_rows = all(settled(self.rows[each])[: len(lead)] == lead for each in rows)
        of_rows &= all(value(each).dim() == len(first) for each in rows)
        grown = not same_shape(node, (wide or rows)[0])
        if of_wide and of_rows and not grown and (not (wide and rows) or self._ends_in_columns(first)):
            arrangements[node] = first

    def _dims(self) -> int:
        return value(self.node).dim()

    def _ends_in_columns(self, arrangement: Arrangement) -> bool:
        return list(arrangement[-1]) == self._columns()


def _float8_from(gathered: Gathered) -> set[Node]:
    """Return the float8 tensors for scaled matmuls that are computed elementwise from a gathered tensor of another
    dtype.
    """
    dtype = value(gathered.node).dtype
    if dtype in FLOAT8 or not dtype.is_floating_point:
        return set()
    found, seen, left = set(), set(gathered.nodes), list(gathered.nodes)
    while left:
        for user in left.pop().users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            if _is_pointwise(user) and value(user).dtype in FLOAT8:
                if _is_multiplied(user):
                    found.add(user)
            elif _is_pointwise(user):
                others = (each for each in user.all_input_nodes if each not in seen)
                if all(is_tensor(each) and _is_scale(each) for each in others):
                    left.append(user)
            elif step_of(user) is not None:
                left.append(user)
    return found


def _is_pointwise(node: Node) -> bool:
    """True if every element of the result is computed from one element of each input."""
    tags = getattr(node.target, "tags", ())
    return is_tensor(node) and (torch.Tag.pointwise in tags or node.target is aten._to_copy.default)


def _is_scale(node: Node) -> bool:
    """True if the node may be a scale: one number, or one for each row."""
    return _is_one(node) or (value(node).dim() > 0 and known(value(node).shape[-1] == 1))


def _is_one(node: Node) -> bool:
    return known(value(node).numel() == 1)


def _same_dtype(one: Node, other: Node) -> bool:
    return value(one).dtype == value(other).dtype


def _is_multiplied(float8: Node) -> bool:
    """True if a scaled matmul has this tensor on the left, possibly rearranged."""
    left = [float8]
    while left:
        node = left.pop()
        for user in node.users:
            matmul, step = matmul_of(user), step_of(user)
            if matmul is not None and matmul.scaled is not None and matmul.left is node:
                return True
            if step is not None:
                left.append(user)
    return False
