"""Methods whose call replays a CUDA graph of many operations, one after another, as a step of decoding does.

All of them have the same inputs. A weight that fits the L2 cache is there from the second operation on, for every
method alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import NotAvailableError
from bench.harness.case import Case
from bench.harness.launch import Rank
from bench.methods.method import Method, Prepared

_WARM_UP = 3


def in_graphs(method: Method, operations: int) -> Method:
    """``method`` with so many operations in a call."""

    def prepare(rank: Rank, case: Case, a: Tensor, b: Tensor) -> Prepared:
        if method.plain and dist.get_backend(rank.group) == "gloo":
            # Not tried: torch's allocator does not survive a capture that has become invalid.
            raise NotAvailableError("gloo waits on the host, which a CUDA graph cannot hold")
        single = method.prepare(rank, case, a, b)
        graph, returned = _captured(single, operations)

        def call() -> Any:
            graph.replay()
            return returned

        def poison() -> None:
            single.poison()
            for output in single.results(returned).values() if single.results else ():
                output.fill_(float("nan"))

        return replace(single, call=call, poison=poison, operations=operations)

    return replace(method, prepare=prepare)


def _captured(single: Prepared, operations: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph, and what its last operation returns."""
    graph = torch.cuda.CUDAGraph()
    with single.around():
        for _ in range(_WARM_UP):  # what is made, compiled or loaded at a first call
            single.call()
        try:
            with torch.cuda.graph(graph):
                for _ in range(operations):
                    returned = single.call()
        except RuntimeError as error:
            raise NotAvailableError(f"it cannot be captured: {str(error).splitlines()[0]}") from None
    return graph, returned
