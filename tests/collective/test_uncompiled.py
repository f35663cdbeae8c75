"""Blocks in which nothing is compiled, in several threads at once."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from symm_overlap.collective.uncompiled import uncompiled


def test_functions_are_compiled_again_after_the_last_of_overlapping_blocks() -> None:
    """Two threads that prepare at the same time leave their blocks in the order in which they entered them."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def is_compiled() -> bool:
        torch._dynamo.reset()
        before = len(graphs)
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
        return len(graphs) > before

    one, other = uncompiled(), uncompiled()
    assert is_compiled()
    one.__enter__()
    other.__enter__()
    assert not is_compiled()
    one.__exit__(None, None, None)
    assert not is_compiled(), "the other block goes on"
    other.__exit__(None, None, None)
    assert is_compiled()


def test_a_block_ends_with_an_exception_too() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    try:
        with uncompiled(), uncompiled():
            raise KeyError
    except KeyError:
        pass
    graphs: list[Any] = []
    torch.compile(double, backend=lambda graph, inputs: graphs.append(graph) or graph)(torch.ones(1))
    assert graphs
