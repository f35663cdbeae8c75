"""The ops of this package, as programs call them, and with parts of their work left out.

The rows without waits, or without waits and copies, show the cost of synchronisation and of data movement. Their
results are meaningless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import symm_overlap
from bench.harness import NotAvailableError
from bench.harness.case import Case
from bench.harness.launch import Rank
from bench.harness.symmetric import symmetric_empty
from bench.methods.method import Method, Prepared, pair, single
from symm_overlap.runtime import state_of
from symm_overlap.settings import transformed, without


def call_of(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor, return_A: bool) -> Prepared:
    """Prepare calls of the public op."""
    group = rank.group_name
    if case.gathers:
        gather = _op("all_gather_matmul")
        weights = [b]

        def gather_call() -> tuple[torch.Tensor, torch.Tensor | None]:
            gathered, outputs = gather(a, weights, 0, group, return_A=return_A)
            return outputs[0], gathered

        prepared = Prepared(gather_call, pair if return_A else lambda returned: {"output": returned[0]})
    elif case.op == "matmul_reduce_scatter":
        scatter = _op("matmul_reduce_scatter")
        prepared = Prepared(lambda: scatter(a, b, "sum", 0, group), single)
    else:
        reduce = _op("matmul_all_reduce")
        prepared = Prepared(lambda: reduce(a, b, "sum", group), single)

    def poison() -> None:
        prepared.call()  # allocates the workspace
        workspace = state_of(rank.group).lane(rank.group, rank.device, 0).workspace
        for parity in (0, 1) if workspace.half else ():
            size = workspace.half // case.dtype.itemsize
            workspace.view(rank.rank, parity, 0, (size,), case.dtype).fill_(float("nan"))

    prepared.poison = poison
    prepared.choice = lambda: symm_overlap.explain(
        case.op, m=case.m, n=case.n, k=case.k, dtype=case.dtype, group=rank.group, device=rank.device.type
    )
    return prepared


def _op(name: str) -> Callable[..., Any]:
    found = getattr(symm_overlap, name, None)
    if found is None:
        raise NotAvailableError(f"this checkout has no symm_overlap.{name}")
    return found  # type: ignore[no-any-return]


def _ours(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    return call_of(rank, case, a, b, return_A=True)


def _no_gathered(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    return call_of(rank, case, a, b, return_A=False)


def _symmetric(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    """The public op with a shard that is already in symmetric memory, where peers read it in place."""
    shard = symmetric_empty(rank, *case.a_shape, dtype=case.dtype).tensor
    prepared = call_of(rank, case, shard, b, return_A=False)

    def load(kind: str) -> None:
        shard.copy_(a)

    prepared.load = load
    return prepared


def _without(*parts: str) -> Callable[[Rank, Case, torch.Tensor, torch.Tensor], Prepared]:
    def prepare(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
        prepared = _ours(rank, case, a, b)
        prepared.results = None
        prepared.around = lambda: transformed(without(*parts))
        return prepared

    return prepare


METHODS = (
    Method("ours", "ours", _ours),
    Method("ours_no_gathered", "ours, return_A=False", _no_gathered, ops=("all_gather_matmul",)),
    Method("ours_symmetric", "ours, shard in symmetric memory", _symmetric, ops=("all_gather_matmul",)),
    Method("ours_no_waits", "ours without waits", _without("waits")),
    Method("ours_no_waits_no_copies", "ours without waits, copies", _without("waits", "copies")),
)
