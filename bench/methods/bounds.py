"""The two bounds: the matmul with no communication, and the copies with neither matmul nor synchronisation."""

from __future__ import annotations

import torch

from bench.harness.case import Case
from bench.harness.launch import Rank
from bench.harness.symmetric import Symmetric, symmetric_empty
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
    shape = (case.rows, case.k) if case.gathers else (case.world, case.rows, case.n)
    symmetric = symmetric_empty(rank, *shape, dtype=case.dtype)
    symmetric.tensor.zero_()
    if case.gathers:
        sources = [symmetric.peers[peer] for peer in order]
    else:
        sources = [symmetric.peers[peer][rank.rank] for peer in order]
        if case.op == "matmul_all_reduce":
            sources += [symmetric.peers[peer][peer] for peer in order]
    moves = [(torch.empty_like(source), source) for source in sources]

    def call() -> Symmetric:
        for target, source in moves:
            target.copy_(source)
        return symmetric  # so that it lives as long as this function

    return Prepared(call, None)


METHODS = (
    Method("matmul", "matmul alone", _matmul),
    Method("copies", "copies alone", _copies),
)
