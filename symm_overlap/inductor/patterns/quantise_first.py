"""Quantise first and gather afterwards, where `quantised` has found that this is possible.

Each rank computes from its shard what it computed from the whole tensor before, and float8 is sent. The maximum of each
row, or of the whole tensor, is gathered too, and replaces the maximum of the gathered tensor. The nodes that are
computed from the maximum stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..arrangement import Arrangement, atoms_of
from ..graph import aten, value
from ..moved import of_parts
from ..writer import SymbolicSizeError, Writer
from .gathered import permutation
from .pattern import c10d
from .quantised import LARGEST, MOVED_FIRST, Quantised


def quantise_first(graph: Graph) -> None:
    """Gather float8 wherever the gathered tensor is quantised to float8 anyway."""
    for node in list(graph.nodes):
        if node.target is c10d.all_gather_into_tensor.default:
            quantised = Quantised(graph, node)
            if quantised.results and not quantised.reason:
                _replace(graph, quantised)


def _replace(graph: Graph, quantised: Quantised) -> None:
    """Quantise the shard, and gather the result. If a size would have to be computed, the graph stays as it is."""
    shards = _Shards(graph, quantised)
    new: dict[Node, Node] = {}
    try:
        for node in graph.nodes:
            if node in quantised.results:
                new[node] = shards.gathered(node, quantised.numbers[node])
            elif node in quantised.rows and node in quantised.largest:
                new[node] = shards.gathered(node, quantised.rows[node])
            elif node in quantised.largest:
                new[node] = shards.largest(node)
    except SymbolicSizeError:
        shards.undo()
        return
    for node, replacement in new.items():
        node.replace_all_uses_with(replacement)
    shards.note_bytes_moved()
    old = {*quantised.gathered.involved, *quantised.numbers, *quantised.rows, *quantised.same, *shards.written}
    old.update(node for step in quantised.steps.values() for node in step.through)
    for node in reversed(list(graph.nodes)):
        if node in old and not node.users:
            graph.erase_node(node)


class _Shards:
    """Writes the nodes that compute this rank's parts from its shard, and the nodes that gather them."""

    def __init__(self, graph: Graph, quantised: Quantised) -> None:
        self.graph, self.quantised = graph, quantised
        self.made: dict[Node, Node] = dict.fromkeys(quantised.gathered.nodes, quantised.gathered.shard)
        self.writers: list[Writer] = []
        self.collectives: list[Node] = []  # the all-gathers of float8
        self.few: list[Node] = []  # the maxima and minima that are gathered

    @property
    def written(self) -> list[Node]:
        """Every node that has been added, in the order of adding."""
        return [node for write in self.writers for node in write.written]

    def undo(self) -> None:
        for write in reversed(self.writers):
            write.undo()

    def _writer(self, before: Node) -> Writer:
        self.writers.append(Writer(self.graph, before))
        return self.writers[-1]

    def of(self, node: Node) -> Node:
        """Return this rank's part of a node, with the dimensions of the shard. If there is one number for each row, the
        last dimension has size 1.
        """
        quantised = self.quantised
        if node in quantised.same:
            return node
        if node not in self.made:
            if node in quantised.steps:
                self.made[node] = self.of(quantised.steps[node].source)
            elif node in quantised.largest:
                source = self.of(node.args[0])  # type: ignore[arg-type]
                self.made[node] = self._writer(node).call(LARGEST[node.target], source, [-1], True)
            else:
                args, kwargs = map_arg((node.args, node.kwargs), self.of)
                self.made[node] = self._writer(node).call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        return self.made[node]

    def gathered(self, node: Node, arrangement: Arrangement) -> Node:
        """Return all ranks' parts of a node, in the arrangement of the node."""
        quantised, part = self.quantised, self.of(node)
        write = self._writer(node)
        whole = self._float8(write, part) if node in quantised.results else self._few(write, part)
        order = atoms_of(quantised.gathered.nodes[quantised.node])
        flat = atoms_of(arrangement)
        order = [atom for atom in order if atom in flat]
        if flat != order:
            whole = write.reshape(whole, [atom.size for atom in order])
            whole = write.call(aten.permute.default, whole, permutation(order, flat))
        return write.like(whole, node)

    def largest(self, node: Node) -> Node:
        """Return the maximum (or minimum) of the whole tensor, computed from every rank's."""
        write, largest = self._writer(node), LARGEST[node.target]
        part = write.call(largest, self.of(node.args[0]))  # type: ignore[arg-type]
        whole = self._few(write, write.reshape(part, [1]))
        return write.like(write.call(largest, whole), node)

    def _float8(self, write: Writer, part: Node) -> Node:
        """Write the same collective with float8 viewed as bytes, which every back end can send."""
        collective: Any = self.quantised.node
        found = write.call(collective.target, write.of_dtype(part, torch.uint8), *collective.args[1:])
        found.meta["stack_trace"] = collective.meta.get("stack_trace", "")
        self.collectives.append(found)
        return write.of_dtype(write.call(c10d.wait_tensor.default, found), value(part).dtype)

    def _few(self, write: Writer, part: Node) -> Node:
        """Write an all-gather of a few numbers of every rank."""
        self.few.append(part)
        return write.op("all_gather", part, 0, self.quantised.node.args[2])

    def note_bytes_moved(self) -> None:
        """Add the bytes of the gathered maxima to the report of the first collective."""
        world: Any = self.quantised.node.args[1]
        moved = [of_parts(value(part), world) for part in self.few]
        self.collectives[0].meta[MOVED_FIRST] = None if None in moved else sum(filter(None, moved))
