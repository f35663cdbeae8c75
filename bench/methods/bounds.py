"""The two bounds: the matmul with no communication, and the copies with neither matmul nor synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.harness.case import Case
from bench.harness.launch import Rank
from bench.harness.symmetric import symmetric_empty
from bench.methods.method import Method, Prepared


def _matmul(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    """The whole matmul of one rank, not split; an all-gather-matmul finds its gathered input already there."""
    output = a.new_empty(case.m, case.n)
    if not case.gathers:
        return Prepared(lambda: torch.mm(a, b, out=output), None)
    gathered = a.new_empty(case.m, case.k)

    def load() -> None:
        gathered.copy_(a.repeat(case.world, 1))

    return Prepared(lambda: torch.mm(gathered, b, out=output), None, load=load)


def _copies(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    """Each rank copies what it needs out of its peers' memory, r+1 first: shards to gather, or partial sums to add up.

    A matmul-all-reduce also fetches the reduced rows of every peer.
    """
    order = [(rank.rank + step) % case.world for step in range(1, case.world)]
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []
    if case.gathers:
        own, _, peers = symmetric_empty(rank, case.rows, case.k, dtype=case.dtype)
        own.copy_(a)
        target = a.new_empty(case.world, case.rows, case.k)
        moves += [(target[peer], peers[peer]) for peer in order]
    else:
        own, _, peers = symmetric_empty(rank, case.world, case.rows, case.n, dtype=case.dtype)
        own.zero_()
        target = a.new_empty(case.world, case.rows, case.n)
        moves += [(target[peer], peers[peer][rank.rank]) for peer in order]
        if case.op == "matmul_all_reduce":
            moves += [(target[peer], peers[peer][peer]) for peer in order]
    return Prepared(_copy_all(moves), None)


def _copy_all(moves: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    def call() -> None:
        for target, source in moves:
            target.copy_(source)

    return call


METHODS = (
    Method("matmul", "matmul alone", _matmul),
    Method("copies", "copies alone", _copies),
)
