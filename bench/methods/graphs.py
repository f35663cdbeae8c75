"""Methods whose call replays a CUDA graph of many operations, one after another, as a step of decoding does.

All operations have the same inputs. For every method, a weight that fits into the L2 cache is there from the second
operation on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
    """Return ``method`` with so many operations in a call."""

    def prepare(rank: Rank, case: Case, a: Tensor, b: Tensor) -> Prepared:
        if method.plain and dist.get_backend(rank.group) == "gloo":
            # Do not even try: an invalid capture leaves torch's allocator in an unusable state.
            raise NotAvailableError("gloo waits on the host, which cannot be captured in a CUDA graph")
        single = method.prepare(rank, case, a, b)
        timed = checked = used = _captured(single, operations)
        if single.exactly is not nullcontext:
            with single.exactly():
                checked = _captured(single, operations)

        @contextmanager
        def exactly() -> Iterator[None]:
            nonlocal used
            used = checked
            try:
                yield
            finally:
                used = timed

        def call() -> Any:
            graph, returned = used
            graph.replay()
            return returned

        def poison() -> None:
            single.poison()
            for output in single.results(checked[1]).values() if single.results else ():
                output.fill_(float("nan"))

        return replace(single, call=call, poison=poison, exactly=exactly, operations=operations)

    return replace(method, prepare=prepare)


def _captured(single: Prepared, operations: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture the graph. Return it and the result of its last operation."""
    graph = torch.cuda.CUDAGraph()
    with single.around():
        for _ in range(_WARM_UP):  # the first calls allocate, compile and load what they need
            single.call()
        try:
            with torch.cuda.graph(graph):
                for _ in range(operations):
                    returned = single.call()
        except RuntimeError as error:
            raise NotAvailableError(f"it cannot be captured: {str(error).splitlines()[0]}") from None
    return graph, returned
