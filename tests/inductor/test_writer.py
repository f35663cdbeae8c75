"""Nodes that take the place of others, and the strides that these had."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node

from symm_overlap.inductor.graph import aten, value
from symm_overlap.inductor.writer import Writer


def placeholder(graph: Graph, tensor: torch.Tensor) -> Node:
    node = graph.placeholder("x")
    node.meta["val"] = tensor
    return node


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_a_node_gets_the_strides_of_the_old_one(order: tuple[int, int, int]) -> None:
    graph = Graph()
    old = placeholder(graph, torch.empty(24, device="meta").view(2, 3, 4).permute(order))
    new = placeholder(graph, torch.empty(old.meta["val"].shape, device="meta"))
    end = graph.output(old)
    node = Writer(graph, end).like(new, old)
    assert value(node).stride() == value(old).stride()
    assert (node is new) == (order == (0, 1, 2)), "nothing is copied if the strides are right"


def test_strides_with_gaps_matter_only_if_somebody_reads_the_memory() -> None:
    graph = Graph()
    old = placeholder(graph, torch.empty(4, 6, device="meta")[:, :5])
    new = placeholder(graph, torch.empty(4, 5, device="meta"))
    end = graph.output(old)
    assert Writer(graph, end).like(new, old) is new
    with graph.inserting_before(end):
        view = graph.call_function(aten.select.int, (old, 0, 1))  # its fake tensor may be a view of another one
        view = graph.call_function(aten.slice.Tensor, (view, 0, 1, 4))
        graph.call_function(aten.as_strided.default, (view, (2,), (6,)))
    with pytest.raises(ValueError, match="as_strided reads what it computes"):
        Writer(graph, end).like(new, old)
