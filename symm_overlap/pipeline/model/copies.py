"""Find the nodes of a traced model that several stages may compute themselves, and values that are changed in place.

Every rank has the whole batch. So values that depend only on the batch (masks, position ids, rotary tables) are
computed by every stage that needs them, and never sent. A value that is changed in place must not be split over stages,
since messages are copies.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ._torch import HigherOrderOperator, OpOverload
from .trace.calls import WHOLE_MODULE
from .trace.effects import Constant, touched, uses_statistics
from .trace.error import TraceError, line_of
from .trace.tracer import Traced
from .trace.vmapped import Vmapped

_KEPT = ("placeholder", "get_attr")  # inputs, parameters and buffers


class Copies:
    """What is known about the nodes of a traced model.

    Attributes:
        free: the nodes that every stage can compute from the batch and from buffers.
        together: for each free node that is changed in place, the nodes that change it. They must stay with it.
        changing: pairs of the nodes that change some memory in place, and all nodes that share this memory.
    """

    def __init__(self, traced: Traced) -> None:
        self._traced = traced
        self._leader: dict[fx.Node, fx.Node] = {}
        changes: list[tuple[fx.Node, fx.Node]] = []  # a node, and an argument that it changes
        for node in traced.graph.nodes:
            changes += [(node, argument) for argument in self._changed_by(node)]
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in traced.graph.nodes:
            groups.setdefault(self._find(node), []).append(node)
        self._changing: dict[fx.Node, list[fx.Node]] = {}  # by the leader of the group
        for node, argument in changes:
            self._changing.setdefault(self._find(argument), []).append(node)
        self.changing = [(nodes, groups[leader]) for leader, nodes in self._changing.items()]
        self.free = self._free()
        self.together = {node: nodes for nodes, group in self.changing for node in group if node in self.free}

    def _changed_by(self, node: fx.Node) -> list[fx.Node]:
        """Return the arguments that a node changes. Note which of its arguments share memory with what it returns."""
        shared, changed = touched(node)
        for other in (*shared, *changed):
            self._unite(node, other)
        return changed

    def _find(self, node: fx.Node) -> fx.Node:
        while (leader := self._leader.get(node, node)) is not node:
            node = leader
        return node

    def _unite(self, node: fx.Node, other: fx.Node) -> None:
        self._leader[self._find(node)] = self._find(other)

    def _free(self) -> set[fx.Node]:
        """See the class. A value that is changed and shares memory with a value that is not free is not free either."""
        # Leaders of groups that are not free. Memory that outlives the call must be changed only once.
        bound = {self._find(group[0]) for _, group in self.changing if any(node.op in _KEPT for node in group)}
        while True:
            free: set[fx.Node] = set()
            for node in self._traced.graph.nodes:
                if self._find(node) not in bound and self._is_free(node, free):
                    free.add(node)
            split = {self._find(group[0]) for _, group in self.changing if not free.issuperset(group)} - bound
            if not split:
                return free
            bound |= split

    def _is_free(self, node: fx.Node, free: set[fx.Node]) -> bool:
        if node.op == "placeholder":
            return True
        if node.op == "get_attr":
            return not node.meta["is_parameter"]
        if node.op == "output" or not free.issuperset(node.all_input_nodes):
            return False
        if node.target is WHOLE_MODULE:
            return self._traced.calls[node].repeatable
        if isinstance(node.target, Vmapped):
            return all(_is_repeatable(inner) for inner in node.target.graph.nodes)
        if isinstance(node.target, OpOverload):
            return _is_repeatable(node)
        return node.target is operator.getitem or isinstance(node.target, Constant)

    def require_whole(self, stage_of: Mapping[fx.Node, int]) -> None:
        """Check that no value that is changed in place is split over stages.

        Raises:
            TraceError: one is.
        """
        for nodes, group in self.changing:
            kept = [node for node in group if node.op in _KEPT]
            used = {stage_of[user] for node in kept for user in node.users if user in stage_of}
            made = {stage_of[node] for node in group if node not in kept and node in stage_of}
            late = {stage_of[node] for node in nodes if node in stage_of}
            moves = not kept and all(node.target is WHOLE_MODULE for node in nodes) and _one_copy(group, stage_of)
            if len(used) > 1 or (late and late != {min(made)} and not moves):
                raise TraceError(_in_place_message(nodes))


def _is_repeatable(node: fx.Node) -> bool:
    """True if a node computes the same again from the same values."""
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded not in node.target.tags and not uses_statistics(node)
    return not isinstance(node.target, HigherOrderOperator)


def _one_copy(group: Sequence[fx.Node], stage_of: Mapping[fx.Node, int]) -> bool:
    """True if at most one of some nodes that share memory goes on to each stage. Then a layer there may change it, as
    activations with ``inplace=True`` do: earlier stages have used it before."""
    last = max(stage_of.values())
    until = {node: max((stage_of.get(user, last) for user in node.users), default=0) for node in group}
    counts = [sum(stage_of.get(node, last) < stage <= until[node] for node in group) for stage in range(1, last + 1)]
    return max(counts, default=0) <= 1


def _in_place_message(nodes: Sequence[fx.Node]) -> str:
    return (
        f"{nodes[0]} changes a value in place that belongs to an earlier stage, or to several{line_of(nodes[0])}. "
        "Values are copied between stages, so other stages would not see the change: write it without in-place "
        "operators, or cut elsewhere"
    )
